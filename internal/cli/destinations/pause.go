package destinations

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// Pause is the command pause.
type Pause struct {
	config.DatabaseFlags
	cli.ActorFlag
	Destination string `arg:"" help:"The destination's name."`
	Reason      string `placeholder:"TEXT" help:"Why, for those who wonder later."`
	JSON        bool   `help:"Print JSON. Fields are added, never renamed or removed."`
}

func (Pause) Help() string {
	return `Keeps relays from claiming for a destination, from their next claim on and until it is resumed; what they have
claimed is still sent. Nothing is lost and no attempt is spent: its deliveries wait.`
}

func (cmd Pause) Run(inv *cli.Invocation) error {
	return onDestination(inv, cmd.Destination, "pause", cmd.JSON, func(ctx context.Context, outbox *ops.Outbox) (ops.Pause, string, error) {
		p, err := outbox.Pause(ctx, cmd.Destination, cmd.Reason)
		if p.ReasonChanged {
			return p, fmt.Sprintf("%s was paused already. Its reason is now%s.", cmd.Destination, output.AfterColon(p.Reason)), err
		}
		if !p.Changed {
			return p, fmt.Sprintf("%s was paused already%s.", cmd.Destination, output.AfterColon(p.Reason)), err
		}
		return p, fmt.Sprintf("%s is paused%s. To continue: outbox-relay resume %[1]s", cmd.Destination, output.AfterColon(p.Reason)), err
	})
}

// Resume is the command resume.
type Resume struct {
	config.DatabaseFlags
	cli.ActorFlag
	Destination  string `arg:"" help:"The destination's name."`
	ResetBreaker bool   `help:"Close its breaker too, and send what is due, without a probe first."`
	JSON         bool   `help:"Print JSON. Fields are added, never renamed or removed."`
}

func (Resume) Help() string {
	return `Ends a pause. A destination that is held because it is down stays held until a probe succeeds; --reset-breaker does not
wait for that, nor for the time that the destination has asked for (Retry-After).`
}

func (cmd Resume) Run(inv *cli.Invocation) error {
	return onDestination(inv, cmd.Destination, "resume", cmd.JSON, func(ctx context.Context, outbox *ops.Outbox) (ops.Pause, string, error) {
		p, err := outbox.Resume(ctx, cmd.Destination, cmd.ResetBreaker)
		text := cmd.Destination + " was not paused."
		if p.Changed {
			text = cmd.Destination + " is resumed."
		}
		switch {
		case p.BreakerReset:
			text += " Its breaker is closed: what is due is sent. To try now what waits for its next attempt: outbox-relay retry --destination " + cmd.Destination
		case p.Breaker != "closed":
			text += fmt.Sprintf(" It is still held, because it is down, and probed by itself; to send what is due, without a probe: outbox-relay resume %s --reset-breaker", cmd.Destination)
		case p.WaitEnded:
			text += " Relays no longer wait as it has asked: within five seconds they send what is due."
		case cmd.ResetBreaker:
			text += " Its breaker was not open, and no relay waits as it has asked."
		}
		return p, text, err
	})
}

// onDestination changes the state of a destination, leaves the line that says who did, and prints
// what came of it.
func onDestination(inv *cli.Invocation, name, action string, asJSON bool, change func(context.Context, *ops.Outbox) (ops.Pause, string, error)) error {
	c, err := config.Read(inv, "database")
	if err != nil {
		return err
	}
	return c.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) error {
		p, text, err := change(ctx, outbox)
		if errors.Is(err, ops.ErrUnknownDestination) {
			return unknownDestination(ctx, outbox, name)
		}
		if err != nil {
			return err
		}
		if p.Changed || p.BreakerReset || p.WaitEnded {
			line := c.Audit(inv, action).Str("destination", name).Str("reason", p.Reason)
			if p.BreakerReset || p.WaitEnded {
				line = line.Bool("breaker_reset", p.BreakerReset).Bool("wait_ended", p.WaitEnded)
			}
			line.Msg("audit")
		}
		return output.Show(inv.Stdout, asJSON, p, func(w io.Writer, _ ops.Pause) error {
			_, err := fmt.Fprintln(w, output.Printable(text))
			return err
		})
	})
}

// unknownDestination says which name was probably meant.
func unknownDestination(ctx context.Context, outbox *ops.Outbox, name string) error {
	names, err := outbox.Destinations(ctx)
	if err != nil {
		return err
	}
	hint := "; see: outbox-relay status"
	if len(names) == 0 {
		hint = "; no destination is known before the first relay has run: outbox-relay run"
	}
	hint = cmp.Or(settings.DidYouMean(name, names), hint)
	return fmt.Errorf("there is no destination %q: no route, no state and no waiting delivery has that name%s", name, hint)
}
