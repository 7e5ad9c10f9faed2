// Package natstest tries destinations of NATS with a real server: what each of its errors means for
// a delivery, and what a relay makes of a server that is killed. Package reader, below it, tries
// consumer/natsconsumer. They are a module of their own, so that the server stays out of the
// relay's dependencies, and make test needs none.
package natstest
