package status

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// Doctor is the command doctor.
type Doctor struct {
	config.SettingFlags
	JSON bool `help:"Print JSON: {checks, not_made, findings: [{check, level, text, remedy, commands}]}. Fields are added, never renamed or removed."`
}

func (Doctor) Help() string {
	return `Examines the configuration, the database and the way to each destination, and changes nothing: the version and settings of the server, a pooler
before it, clocks, old transactions, rights, each table, index, constraint, trigger and function of the schema against the migrations, dead rows, the identity
of the database, whether relays can take events and send what they have taken, events without deliveries, what status advises, and a connection (TCP, TLS, no request) to each destination from this host. Each finding has
its remedy.

Exits 6 if a finding is an error, with warnings alone 0.`
}

func (cmd Doctor) Run(inv *cli.Invocation) error {
	c := config.Load(inv)
	problems := c.Problems
	if !c.Readable {
		if alone := config.WithoutFile(inv, "database"); alone.Err() == nil {
			c = alone
		}
	}
	var found ops.Checkup
	for _, p := range problems {
		found.Findings = append(found.Findings, ops.Finding{Check: "configuration", Level: ops.LevelError, Text: p.String(), Remedy: "correct it, then: outbox-relay config check"})
	}
	for _, w := range c.Warnings {
		found.Findings = append(found.Findings, ops.Finding{Check: "configuration", Level: ops.LevelWarning, Text: w.String(), Remedy: "correct it, then: outbox-relay config check"})
	}
	if c.Pool != nil {
		if err := examine(inv.Ctx, c, &found, len(problems) == 0); err != nil {
			return err
		}
	} else {
		found.NotMade = []string{"the database", "the destinations"}
	}
	found.Checks = append([]string{"configuration"}, found.Checks...)
	failed := found.Failed()
	found = found.Bounded()
	if err := output.Show(inv.Stdout, cmd.JSON, found, printCheckup); err != nil {
		return err
	}
	if failed {
		return cli.Foundf("something needs fixing")
	}
	return nil
}

// examine adds what the database and the destinations show.
func examine(ctx context.Context, c *config.Config, found *ops.Checkup, whole bool) error {
	pool, err := c.Open(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	cfg := ops.ExamineConfig{
		Environment: c.Relay.Environment, Egress: c.Relay.Egress, OldestTransaction: c.Relay.Alerts.VacuumBlockedOver, Session: func(ctx context.Context) error { return checkSession(ctx, c) },
	}
	if whole {
		cfg.Destinations = c.Relay.Destinations
	}
	more, err := ops.New(pool).Examine(ctx, cfg)
	if !whole { // nothing was connected to
		more.Checks = slices.DeleteFunc(more.Checks, func(name string) bool { return name == "destinations" })
		more.NotMade = append(more.NotMade, "destinations")
	}
	found.Checks, found.NotMade, found.Findings = more.Checks, more.NotMade, append(found.Findings, more.Findings...)
	return err
}

// checkSession connects as a relay does, and checks that the session is its own.
func checkSession(ctx context.Context, c *config.Config) error {
	if c.Direct != nil {
		return nil
	}
	conn := c.Pool.ConnConfig.Copy()
	for name, value := range map[string]string{"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "synchronous_commit": "off"} {
		conn.RuntimeParams[name] = value
	}
	session, err := pgx.ConnectConfig(ctx, conn)
	if err != nil {
		if strings.Contains(err.Error(), "unsupported startup parameter") {
			return fmt.Errorf("%w: %w", pg.ErrPooler, err)
		}
		return err
	}
	defer func() { _ = session.Close(context.WithoutCancel(ctx)) }()
	return pg.CheckSession(ctx, session)
}

func printCheckup(w io.Writer, c ops.Checkup) error {
	if len(c.Findings) == 0 {
		_, err := fmt.Fprintf(w, "Nothing is wrong. Checked: %s.\n", strings.Join(c.Checks, ", "))
		return err
	}
	for _, f := range c.Findings {
		color := map[string]string{ops.LevelError: output.Red, ops.LevelWarning: output.Yellow}[f.Level]
		output.PaintedProse(w, color, "         ", fmt.Sprintf("%-7s", f.Level), fmt.Sprintf("  %s: %s", f.Check, f.Text))
		remedies := f.Commands // each on its line, or the comment behind one would hide the next
		if len(remedies) == 0 {
			remedies = []string{f.Remedy}
		}
		for _, remedy := range remedies {
			fmt.Fprintf(w, "         %s\n", remedy)
		}
	}
	if c.FindingsLeft > 0 {
		fmt.Fprintf(w, "\nand %d more like these\n", c.FindingsLeft)
	}
	fmt.Fprintf(w, "\n%s. Checked: %s.\n", plain.Plural(len(c.Findings)+c.FindingsLeft, "finding", "findings"), strings.Join(c.Checks, ", "))
	if len(c.NotMade) > 0 {
		fmt.Fprintf(w, "Could not be checked because of these: %s.\n", strings.Join(c.NotMade, ", "))
	}
	return nil
}
