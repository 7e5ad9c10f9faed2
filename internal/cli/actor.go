package cli

import (
	"cmp"
	"os"
	"os/user"

	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// ActorFlag is for commands that the audit records.
type ActorFlag struct {
	As string `placeholder:"NAME" help:"Who does it, for the audit. Default: user@host."`
}

// Actor returns the person that the audit names.
func (inv *Invocation) Actor() ops.Actor {
	return ops.Actor{Name: cmp.Or(inv.Flags["as"], OSUser()), Origin: ops.OriginCLI}
}

// OSUser returns the person at the keyboard, as far as a program can know.
func OSUser() string {
	name, host := "unknown", "unknown"
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	if h, err := os.Hostname(); err == nil {
		host = h
	}
	return name + "@" + host
}
