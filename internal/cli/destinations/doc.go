// Package destinations is about where events go: the commands pause, resume and routes.
package destinations
