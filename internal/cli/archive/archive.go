// Package archive is the command archive, which does by hand what relays do every night.
package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/bulk"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/archive"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// Command is the command archive.
type Command struct {
	Run runCommand `cmd:"" help:"Do now what relays do every night: archive, drop, prune."`
}

type runCommand struct {
	config.DatabaseFlags
	cli.ActorFlag
	Yes    bool `short:"y" help:"Do not ask, where no retention is configured."`
	DryRun bool `help:"Count what would be done, and change nothing."`
	Batch  int  `default:"500" help:"How many events one transaction looks at."`
	JSON   bool `name:"json" help:"Print JSON: {dry_run, complete, events, months, attempts, processed_events}. Fields are added, never renamed or removed."`
}

func (runCommand) Help() string {
	return `Moves events whose deliveries were all delivered or discarded long enough ago into outbox_archive, drops the months
of that which have been kept long enough, and removes old attempts and what a receiver in the same schema has finished;
after how long stands in the section retention of the configuration. What is pending, parked, held or failed stays.

It works in short transactions with pauses in between, and may be interrupted and repeated at any time: a signal ends it
after the batch at hand, with exit code 130 and a line that says what was done. It exits 1 if a relay archives at the
moment.

Without a configured retention it says what the defaults remove, and asks: relays may be told to keep it for longer.`
}

// confirm asks where nothing says how long relays keep what goes now.
func (cmd runCommand) confirm(ctx context.Context, inv *cli.Invocation, c *config.Config, job archive.Job) error {
	given := func(name string) bool { return c.Given("retention." + name) }
	if cmd.DryRun || cmd.Yes || slices.ContainsFunc([]string{"archive_after", "delete_after", "attempts", "processed_events"}, given) {
		return nil
	}
	due, err := job.Rehearse(ctx)
	if err != nil || removals(due) == 0 {
		return err
	}
	return inv.Confirm("no retention is configured here, and relays may keep for longer what goes by the defaults: "+summary(due), "nothing was done")
}

func (cmd runCommand) Run(inv *cli.Invocation) error {
	if cmd.Batch < 1 || cmd.Batch > 10_000 {
		return cli.Usagef("--batch: %d is out of range; write 1 to 10000", cmd.Batch)
	}
	c, err := config.Read(inv, "database", "retention")
	if err != nil {
		return err
	}
	keep := c.Relay.Retention
	keep.Batch = cmd.Batch
	progress := progress{out: inv.Stderr, terminal: output.IsTerminal(inv.Stderr), told: time.Now()}
	return c.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) error {
		job := archive.Job{DB: outbox.DB(), Keep: keep, Progress: progress.tell}
		if err := cmd.confirm(ctx, inv, c, job); err != nil {
			return err
		}
		var done archive.Result
		run := func(int64) (removed int64, text string, err error) {
			done, err = job.Run(ctx)
			return removals(done), summary(done), err
		}
		var err error
		if cmd.DryRun {
			done, err = job.Rehearse(ctx)
		} else {
			err = outbox.Recorded(ctx, "archive", run)
		}
		progress.end()
		if n := removals(done); !cmd.DryRun && n > 0 {
			bulk.Audit(inv, c, "archive run", summary(done), n, err)
		}
		// It says what was done, also when that is not all.
		return errors.Join(cmd.print(inv.Stdout, done, err == nil), err)
	})
}

func (cmd runCommand) print(w io.Writer, done archive.Result, complete bool) error {
	type report struct {
		DryRun   bool `json:"dry_run"`
		Complete bool `json:"complete"`
		archive.Result
	}
	return output.Show(w, cmd.JSON, report{cmd.DryRun, complete, done}, func(w io.Writer, r report) error {
		verb := "done: "
		if r.DryRun {
			verb = "to be done: "
		}
		_, err := fmt.Fprintln(w, verb+summary(r.Result))
		return err
	})
}

// removals counts what left the outbox, its archive and the other tables.
func removals(r archive.Result) int64 {
	return r.Events + r.Attempts + r.ProcessedEvents + int64(len(r.Months))
}

func summary(done archive.Result) string {
	months := plain.Plural(len(done.Months), "month", "months") + " dropped"
	if len(done.Months) > 0 {
		months += " (" + strings.Join(done.Months, ", ") + ")"
	}
	return fmt.Sprintf("%s archived, %s, %s and %s removed", plain.Plural(done.Events, "event", "events"), months,
		plain.Plural(done.Attempts, "attempt", "attempts"), plain.Plural(done.ProcessedEvents, "row of processed_events", "rows of processed_events"))
}

// reportInterval is how often a run without a terminal says how far it is.
const reportInterval = 30 * time.Second

// progress says how far a run is: on a terminal in one line that changes, elsewhere in a line now
// and then.
type progress struct {
	out      io.Writer
	terminal bool
	told     time.Time
	drawn    bool
}

func (p *progress) tell(now archive.Progress) {
	interval := reportInterval
	if p.terminal {
		interval = 100 * time.Millisecond
	}
	if time.Since(p.told) < interval && now.Waiting == "" {
		return
	}
	p.told = time.Now()
	text := summary(now.Total)
	if now.Waiting != "" {
		text += "; waiting: " + now.Waiting
	}
	if p.terminal {
		output.Draw(p.out, text, false)
		p.drawn = true
		return
	}
	fmt.Fprintln(p.out, output.Printable(text))
}

// end leaves the line to what follows.
func (p *progress) end() {
	if p.drawn {
		output.Draw(p.out, "", false)
	}
}
