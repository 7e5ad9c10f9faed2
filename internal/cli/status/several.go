package status

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// askedAtOnce bounds how many databases are asked at once.
const askedAtOnce = 8

// An outboxStatus is what one of several databases says, or why it says nothing.
type outboxStatus struct {
	Database string      `json:"database"`
	Status   *ops.Status `json:"status,omitempty"`
	Error    string      `json:"error,omitempty"`

	err error
}

// allStatus is what status prints of several databases.
type allStatus struct {
	Databases []outboxStatus `json:"databases"`
}

// trouble ranks a database: those that do not answer come first, then those with advice.
func (s outboxStatus) trouble() int {
	switch {
	case s.Status == nil:
		return 2
	case len(s.Status.Advice) > 0:
		return 1
	}
	return 0
}

// ofSeveral is Run for several databases. It fails if one of them does not answer.
func (cmd Command) ofSeveral(inv *cli.Invocation, c *config.Config) error {
	if cmd.Healthcheck {
		return healthyInOne(inv, c)
	}
	look := func() error {
		all := askAll(inv.Ctx, c, func(ctx context.Context, one *config.Config) (found *ops.Status, err error) {
			err = one.WithOutbox(ctx, func(outbox *ops.Outbox) error {
				status, err := outbox.Status(ctx, c.Relay.Environment)
				if err != nil {
					return err
				}
				if status, err = status.Bounded(ops.List{Prefix: cmd.Prefix, Limit: cmd.Limit}); err != nil {
					return cli.Usagef("--%w", err)
				}
				found = &status
				return nil
			})
			return found, err
		})
		slices.SortStableFunc(all, func(a, b outboxStatus) int { return cmp.Compare(b.trouble(), a.trouble()) })
		if cmd.Watch {
			output.ClearScreen(inv.Stdout)
		}
		if err := output.Show(inv.Stdout, cmd.JSON, allStatus{all}, cmd.printAll); err != nil || cmd.Watch {
			return err
		}
		if silent := slices.DeleteFunc(all, func(s outboxStatus) bool { return s.err == nil }); len(silent) > 0 {
			return fmt.Errorf("%s: %w", plain.Plural(len(silent), "database was not read", "databases were not read"), silent[0].err)
		}
		return nil
	}
	if cmd.Watch {
		return cli.EverySecond(inv.Ctx, look)
	}
	return look()
}

// askAll asks every database, in the order of the configuration.
func askAll(ctx context.Context, c *config.Config, ask func(context.Context, *config.Config) (*ops.Status, error)) []outboxStatus {
	all := make([]outboxStatus, len(c.Outboxes))
	var asking errgroup.Group
	asking.SetLimit(askedAtOnce)
	for i, o := range c.Outboxes {
		asking.Go(func() error {
			status, err := ask(ctx, c.With(o))
			if all[i] = (outboxStatus{Database: o.Name, Status: status, err: err}); err != nil {
				all[i].Status, all[i].Error = nil, err.Error()
			}
			return nil
		})
	}
	_ = asking.Wait()
	return all
}

func (cmd Command) printAll(w io.Writer, s allStatus) error {
	for _, one := range s.Databases {
		switch one.trouble() {
		case 2:
			fmt.Fprintf(w, "database %s: %s\n", one.Database, one.Error)
		case 1:
			fmt.Fprintf(w, "database %s:\n", one.Database)
			if err := cmd.printStatus(w, *one.Status); err != nil {
				return err
			}
			fmt.Fprintln(w)
		default:
			var pending int64
			for _, d := range one.Status.Destinations {
				pending += d.Pending
			}
			fmt.Fprintf(w, "database %s: all is well, %s, %s pending\n", one.Database, plain.Plural(len(one.Status.Relays), "relay", "relays"), upTo(pending, most))
		}
	}
	return nil
}

// healthyInOne prints a line for each database. One that is away is no reason to restart the relay,
// which serves the others.
func healthyInOne(inv *cli.Invocation, c *config.Config) error {
	var failures []error
	all := askAll(inv.Ctx, c, func(ctx context.Context, one *config.Config) (*ops.Status, error) {
		return nil, checkHealth(ctx, io.Discard, one)
	})
	for _, s := range all {
		if s.err != nil {
			fmt.Fprintf(inv.Stderr, "database %s: %s\n", s.Database, output.Printable(s.err.Error()))
			failures = append(failures, s.err)
		}
	}
	if len(failures) == len(all) {
		return errors.Join(failures[:1]...)
	}
	_, err := fmt.Fprintf(inv.Stdout, "ok: relay %q lives in %d of %s\n", c.Relay.Name, len(all)-len(failures), plain.Plural(len(all), "database", "databases"))
	return err
}
