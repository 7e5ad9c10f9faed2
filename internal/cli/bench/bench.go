package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/relay"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/measure"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// Command is the command bench.
type Command struct {
	config.FileFlag
	URL      string        `placeholder:"URL" help:"Receiver to send to, such as one for staging. Default: a receiver of this command that answers 200."`
	Events   int           `default:"20000" placeholder:"N" help:"How many events to drain (20000)."`
	Rate     int           `default:"200" placeholder:"N" help:"Events a second afterwards, whose latency is measured; 0: none (200)."`
	Duration time.Duration `default:"10s" placeholder:"10s" help:"For how long events come at the rate (10s)."`
	Inserts  time.Duration `default:"3s" placeholder:"3s" help:"For how long 8 clients then insert as fast as they can, once beside the relay and once without it; 0: not at all (3s)."`
	Payload  int           `default:"300" placeholder:"BYTES" help:"Size of a payload (300)."`
	JSON     bool          `help:"Print JSON. Fields are added, never renamed or removed."`
}

func (Command) Help() string {
	return `Measures what a relay does on this machine with your database. The events live in their own schema, outbox_bench_ and a random name,
which is removed at the end, also after Ctrl-C. The tables of a real outbox are neither read nor written; but the load is real, and
so are the requests that --url receives: their type is bench.event, and their payload is {"pad":"xxx…"}.

It takes about 20 seconds, in three parts. First as many events as --events wait, and the relay drains them. Then events are committed at --rate,
each in its own transaction, and the time from the commit to the receiver's answer is measured. At last 8 clients commit events as fast as the
database answers, beside the relay and without it: that is how many events producers can commit. Requests to --url have what the section
defaults and the environment say: secrets, credentials, timeout, limits. Beside a configuration file with its own destinations, name another file with --config.

Processor time is that of this process and of the whole PostgreSQL server, all its sessions included, so that the second part counts the inserts, too. It is
counted where the server runs on this machine, and where it is long enough: of a few hundred events it is not. The WAL is that of the whole
server. The login needs the right to create schemas in the database.`
}

// schemaPrefix begins the names of schemas that bench makes and removes.
const schemaPrefix = "outbox_bench_"

// What bench takes, so that a slip of the keyboard fills no disk.
const (
	maxEvents  = 10_000_000
	maxRate    = 100_000
	minPayload = 32
	maxPayload = 1 << 20

	maxDuration = time.Hour
	maxInserts  = time.Minute
)

func (cmd Command) check() error {
	switch {
	case cmd.Events < 1 || cmd.Events > maxEvents:
		return cli.Usagef("--events %d is out of range; write 1 to %d", cmd.Events, maxEvents)
	case cmd.Rate < 0 || cmd.Rate > maxRate:
		return cli.Usagef("--rate %d is out of range; write 0 to %d", cmd.Rate, maxRate)
	case cmd.Payload < minPayload || cmd.Payload > maxPayload:
		return cli.Usagef("--payload %d is out of range; write %d to %d", cmd.Payload, minPayload, maxPayload)
	case cmd.Rate > 0 && (cmd.Duration < time.Second || cmd.Duration > maxDuration):
		return cli.Usagef("--duration %s is out of range; write 1s to 1h", cmd.Duration)
	case float64(cmd.Rate)*cmd.Duration.Seconds() > maxEvents:
		return cli.Usagef("--rate %d for a --duration of %s is too much: at most %d events", cmd.Rate, cmd.Duration, maxEvents)
	case cmd.Inserts != 0 && (cmd.Inserts < 100*time.Millisecond || cmd.Inserts > maxInserts):
		return cli.Usagef("--inserts %s is out of range; write 100ms to 1m, or 0 for none", cmd.Inserts)
	}
	return nil
}

// Report is what bench prints.
type Report struct {
	Database    string   `json:"database"`
	Receiver    string   `json:"receiver"`
	RoundTripMS float64  `json:"round_trip_ms"` // to the database
	Payload     int      `json:"payload_bytes"`
	Drain       Drain    `json:"drain"`
	Steady      *Steady  `json:"steady,omitempty"`
	Inserts     *Inserts `json:"inserts,omitempty"`
}

// Drain is what the drain showed. Pointers are nil where nothing could be counted, or too little to
// divide.
type Drain struct {
	Events         int      `json:"events"`
	Attempts       int      `json:"attempts"` // more than events, if some were retried
	Seconds        float64  `json:"seconds"`
	PerSecond      float64  `json:"events_per_second"`
	RelayMicros    *float64 `json:"relay_cpu_us_per_event"`
	PostgresMicros *float64 `json:"postgres_cpu_us_per_event"`
	WALBytes       float64  `json:"wal_bytes_per_event"`
	InFlight       float64  `json:"requests_in_flight"` // on average
	AnswerMS       float64  `json:"answer_ms"`          // on average
	Limit          string   `json:"limit"`
}

// Steady is what the steady rate showed, in milliseconds from commit to answer.
type Steady struct {
	Rate        int      `json:"rate"`
	Events      int      `json:"events"`
	P50         float64  `json:"p50_ms"`
	P90         float64  `json:"p90_ms"`
	P99         float64  `json:"p99_ms"`
	Max         float64  `json:"max_ms"`
	RelayMS     *float64 `json:"relay_cpu_ms_per_second"`
	PostgresMS  *float64 `json:"postgres_cpu_ms_per_second"`
	CommittedAt float64  `json:"committed_per_second"` // what the producers reached
}

// Inserts is how fast clients committed events, each in its own transaction.
type Inserts struct {
	Clients int        `json:"clients"`
	Seconds float64    `json:"seconds"` // each of the two
	Alone   InsertRate `json:"without_relay"`
	Beside  InsertRate `json:"beside_relay"` // which delivers meanwhile
}

// An InsertRate is one measurement of [Inserts].
type InsertRate struct {
	PerSecond  float64  `json:"per_second"`
	PostgresMS *float64 `json:"postgres_cpu_ms_per_insert"` // beside the relay, of its claims and settles too
}

func (cmd Command) Run(inv *cli.Invocation) (err error) {
	if err := cmd.check(); err != nil {
		return err
	}
	sections := []string{"database"}
	if cmd.URL != "" {
		own := config.Load(inv, "database")
		if names := own.Children("destinations"); len(names) > 0 && !slices.Contains(names, config.DefaultDestination) {
			return cli.Usagef("--url stands beside the destinations of %s (%s); name a file without destinations with --config", own.File, strings.Join(names, ", "))
		}
		inv.Flags["destination-url"] = cmd.URL
		sections = append(sections, "destinations", "defaults", "egress")
	}
	c, err := config.Read(inv, sections...)
	if err != nil {
		return nameURL(err)
	}
	b := &bench{cmd: cmd, inv: inv, config: c, schema: schemaPrefix + strings.ToLower(rand.Text()[:10])}
	if b.pool, err = c.Open(inv.Ctx); err != nil {
		return err
	}
	defer b.pool.Close()
	if err := b.createSchema(inv.Ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.dropSchema(inv.Ctx)) }()
	report, err := b.measure(inv.Ctx)
	if err != nil {
		return err
	}
	return output.Show(inv.Stdout, cmd.JSON, report, printReport)
}

// nameURL lets a mistake of the configuration name the flag that was given.
func nameURL(err error) error {
	var mistakes settings.Error
	if !errors.As(err, &mistakes) {
		return err
	}
	return cli.ExitError{Code: cli.ExitConfig, Err: errors.New(strings.ReplaceAll(mistakes.Error(), "flag --destination-url", "flag --url"))}
}

// A bench is one run of the command.
type bench struct {
	cmd    Command
	inv    *cli.Invocation
	config *config.Config
	schema string
	pool   *pgxpool.Pool // of one connection

	load        *measure.Process
	postmaster  int // 0: the server is not on this machine
	destination relay.Destination
}

func (b *bench) progress(format string, args ...any) {
	fmt.Fprintf(b.inv.Stderr, format+"\n", args...)
}

// selectLeft finds the schemas of earlier runs that were killed, and of runs that are under way.
const selectLeft = `SELECT coalesce(array_agg(quote_ident(nspname) ORDER BY nspname), '{}') FROM pg_namespace WHERE starts_with(nspname, $1)`

// createSchema makes the schema of this run and migrates it. It fails, rather than use what is
// there, if the name is taken.
func (b *bench) createSchema(ctx context.Context) (err error) {
	var left []string
	if err := b.pool.QueryRow(ctx, selectLeft, schemaPrefix).Scan(&left); err != nil {
		return fmt.Errorf("look for schemas of earlier runs: %w", err)
	}
	if len(left) > 0 {
		b.progress("unless another bench runs, remove what a killed one has left: DROP SCHEMA %s CASCADE", strings.Join(left, ", "))
	}
	if _, err := b.pool.Exec(ctx, "CREATE SCHEMA "+pgx.Identifier{b.schema}.Sanitize()); err != nil {
		if conn := b.pool.Config().ConnConfig; pg.HasCode(err, pg.LacksPrivilege) {
			err = fmt.Errorf("%w; let the database's owner run GRANT CREATE ON DATABASE %s TO %s, or try your own database", err,
				pgx.Identifier{conn.Database}.Sanitize(), pgx.Identifier{conn.User}.Sanitize())
		}
		return fmt.Errorf("create schema %s: %w", b.schema, err)
	}
	b.progress("using schema %s of %s; should this command be killed, remove it: DROP SCHEMA %s CASCADE", b.schema, b.config.DatabaseName(), b.schema)
	b.config.Relay.Schema = b.schema
	db, m, err := b.config.OpenMigrator(migrations.Outbox, migrations.Options{})
	if err == nil {
		_, err = m.Up(ctx)
		err = errors.Join(err, db.Close())
	}
	if err != nil {
		return errors.Join(fmt.Errorf("migrate schema %s: %w", b.schema, err), b.dropSchema(ctx))
	}
	return nil
}

// dropTimeout bounds the removal of the schema. It drops tables of at most a few gigabytes.
const dropTimeout = time.Minute

// dropSchema removes the schema, also after the command was interrupted. Only a schema that
// createSchema made is dropped.
func (b *bench) dropSchema(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropTimeout)
	defer cancel()
	// An interrupted statement has closed the connection; the pool makes another one.
	if _, err := b.pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+pgx.Identifier{b.schema}.Sanitize()+" CASCADE"); err != nil {
		return fmt.Errorf("remove schema %s: %w; remove it by hand: DROP SCHEMA %s CASCADE", b.schema, err, b.schema)
	}
	return nil
}

func printReport(w io.Writer, r Report) error {
	fmt.Fprintf(w, "database  %s, round trip %.2f ms\nreceiver  %s\n\n", r.Database, r.RoundTripMS, r.Receiver)
	d := r.Drain
	fmt.Fprintf(w, "drain     %s of %d bytes in %.2f s: %.0f events/s\n", plain.Plural(d.Events, "event", "events"), r.Payload, d.Seconds, d.PerSecond)
	if again := d.Attempts - d.Events; again > 0 {
		fmt.Fprintf(w, "          %s sent again\n", plain.Plural(again, "request was", "requests were"))
	}
	fmt.Fprintf(w, "          per event: relay's CPU %s, PostgreSQL's CPU %s, WAL %.0f B\n", amount(d.RelayMicros, "%.0f µs"), amount(d.PostgresMicros, "%.0f µs"), d.WALBytes)
	_, err := fmt.Fprintf(w, "          limit: %s\n", d.Limit)
	if s := r.Steady; s != nil {
		fmt.Fprintf(w, "\nat %-6s p50 %.1f ms, p90 %.1f ms, p99 %.1f ms, max %.1f ms, from commit to answer\n", fmt.Sprintf("%d/s", s.Rate), s.P50, s.P90, s.P99, s.Max)
		fmt.Fprintf(w, "          per second: relay's CPU %s, PostgreSQL's CPU %s, inserts included\n", amount(s.RelayMS, "%.0f ms"), amount(s.PostgresMS, "%.0f ms"))
		_, err = fmt.Fprintln(w, "          an event costs more here than in the drain, where many share a claim and a settle")
		if s.CommittedAt < 0.95*float64(s.Rate) {
			_, err = fmt.Fprintf(w, "          the database committed only %.0f events/s\n", s.CommittedAt)
		}
	}
	if i := r.Inserts; i != nil {
		fmt.Fprintf(w, "\ninserts   %d clients, each event in its own transaction\n", i.Clients)
		fmt.Fprintf(w, "          without a relay: %.0f/s, PostgreSQL's CPU %s per event\n", i.Alone.PerSecond, amount(i.Alone.PostgresMS, "%.2f ms"))
		_, err = fmt.Fprintf(w, "          beside the relay, which delivers meanwhile: %.0f/s, PostgreSQL's CPU %s per event, claims and settles included\n",
			i.Beside.PerSecond, amount(i.Beside.PostgresMS, "%.2f ms"))
	}
	return err
}

// amount writes processor time, or that it was not counted.
func amount(value *float64, format string) string {
	if value == nil {
		return "not counted"
	}
	return fmt.Sprintf(format, *value)
}
