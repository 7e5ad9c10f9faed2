package events

import (
	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
)

// Retry is the command retry.
type Retry struct {
	config.DatabaseFlags
	cli.ActorFlag
	selectionFlags
}

func (Retry) Help() string {
	return `Makes due what waits for its next attempt, such as after a wrong secret or URL was fixed. Deliveries keep their attempts, so
that one which fails again waits for the next time of its schedule; their place in their ordering key; and the time after which
they are not sent. Left alone is what is due, what its producer wants sent later, and what failed for good: replay sends that again.

  outbox-relay retry --destination logistics                       # all that waits there
  outbox-relay retry --destination logistics --reason unauthorized
  outbox-relay retry 17                                            # one event

A destination that is paused or held stays so, and an event waits behind the one in front of its ordering key; the command
says so, and what ends it. It works in batches of 1000, each a
transaction; Ctrl-C ends it between two. The same command again continues.`
}

func (cmd Retry) Run(inv *cli.Invocation) error {
	c, err := config.Read(inv, "database")
	if err != nil {
		return err
	}
	return operation{
		verb: "retry", done: "made due", selectionFlags: cmd.selectionFlags,
	}.run(inv, c)
}
