// Package natstest tries destinations of NATS with a real server: what each of its errors means for
// a delivery, and what a relay makes of a server that is killed. It is its own module, so that
// the server stays out of the relay's dependencies.
package natstest
