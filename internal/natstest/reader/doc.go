// Package reader tries consumer/natsconsumer with a real server, which is killed and loses streams.
package reader
