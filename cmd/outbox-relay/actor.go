package main

import (
	"cmp"
	"os"
	"os/user"

	"github.com/outbox-relay/outbox-relay/relay/ops"
)

// actorFlag is of commands that the audit records.
type actorFlag struct {
	As string `placeholder:"NAME" help:"Who does it, for the audit. Default: user@host."`
}

// actor returns whom the audit names.
func (inv *invocation) actor() ops.Actor {
	return ops.Actor{Name: cmp.Or(inv.flags["as"], who()), Origin: ops.OriginCLI}
}

// who returns the person at the keyboard, as far as a program can know.
func who() string {
	name, host := "unknown", "unknown"
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	if h, err := os.Hostname(); err == nil {
		host = h
	}
	return name + "@" + host
}
