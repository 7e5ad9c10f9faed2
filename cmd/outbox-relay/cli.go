package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// Exit codes. They are promises.
const (
	exitFailed      = 1
	exitUsage       = 2
	exitConfig      = 3
	exitDatabase    = 4 // the database cannot be reached
	exitSchema      = 5 // it has another schema than this build works with
	exitInterrupted = 130
)

const overview = `outbox-relay delivers the events that a service commits to its outbox table.

  export OUTBOX_DATABASE_URL=postgres://billing:password@localhost:5432/billing
  export OUTBOX_DESTINATION_URL=https://logistics.internal/webhooks/finance
  export OUTBOX_SIGNING_SECRET="whsec_$(openssl rand -base64 32)"    # optional
  outbox-relay migrate up      create or upgrade the tables
  outbox-relay run             deliver until told to stop
  outbox-relay status          what waits, what failed, who delivers

  outbox-relay events list --status failed | show EVENT  what did not arrive, and why; one event by id, key or reference
  outbox-relay explain EVENT                             its history, and why it waits
  outbox-relay doctor                                    what is wrong with configuration, database, destinations
  outbox-relay replay --destination NAME | ID            send again what failed
  outbox-relay retry --destination NAME | ID             attempt now what waits for its next attempt
  outbox-relay discard --destination NAME | ID           give up what waits or failed
  outbox-relay pause | resume NAME                       stop sending to a destination; go on
  outbox-relay relays | routes list | routes test TYPE   who delivers; where events go
  outbox-relay archive run                               archive what is settled, drop and prune what is old, now
  outbox-relay migrate down | status                     revert the last migration; list them
  outbox-relay alert test                                send a test alert to every channel
  outbox-relay identity show | accept | discard-pending  after a move, or on a copy of the database: who may work here
  outbox-relay config init | check | show                write a file; find every mistake; print what is in effect, and why
  outbox-relay inbox status | list | show | replay | ignore | prune    the same for a receiver, at its own database
  outbox-relay events tail                               what happens from now on
  outbox-relay send TYPE | listen                        insert one event; receive events and print them
  outbox-relay completion bash|zsh|fish | man            completion for a shell; the manual page
  outbox-relay bench                                     how fast it is here, and what limits it
  outbox-relay version

Everything can also stand in outbox-relay.yaml. More: outbox-relay <command> --help
Exit codes: 0 ok, 1 failed, 2 usage, 3 configuration, 4 database unreachable, 5 schema mismatch, 130 interrupted
`

// grammar is the command line.
type grammar struct {
	Run        runCmd        `cmd:"" help:"Deliver events until told to stop."`
	Migrate    migrateCmd    `cmd:"" help:"Create, upgrade, revert or list the tables."`
	Status     statusCmd     `cmd:"" help:"Show what waits, what failed, who delivers."`
	Events     eventsCmd     `cmd:"" help:"List deliveries, or show one event."`
	Explain    explainCmd    `cmd:"" help:"Tell the history of one event, and why it waits."`
	Send       sendCmd       `cmd:"" help:"Insert one event."`
	Listen     listenCmd     `cmd:"" help:"Receive events and print them."`
	Doctor     doctorCmd     `cmd:"" help:"Find what is wrong with configuration, database and destinations; exit 1 if there is an error."`
	Alert      alertCmd      `cmd:"" help:"Try the alert channels."`
	Replay     replayCmd     `cmd:"" help:"Send failed, delivered or discarded deliveries again."`
	Retry      retryCmd      `cmd:"" help:"Attempt now what waits for its next attempt."`
	Discard    discardCmd    `cmd:"" help:"Give pending, parked or failed deliveries up."`
	Pause      pauseCmd      `cmd:"" help:"Send nothing to a destination until it is resumed."`
	Resume     resumeCmd     `cmd:"" help:"End a pause; with --reset-breaker a hold too."`
	Relays     relaysCmd     `cmd:"" help:"List the relays that run."`
	Routes     routesCmd     `cmd:"" help:"List the stored routes, or show where an event type goes."`
	Archive    archiveCmd    `cmd:"" help:"Archive, drop and prune by hand what relays do every night."`
	Config     configCmd     `cmd:"" help:"Check or show the configuration."`
	Identity   identityCmd   `cmd:"" help:"Compare this database with what relays were accepted on, and decide about a copy."`
	Inbox      inboxCmd      `cmd:"" help:"Look at a receiver's events, work them again, ignore or forget them."`
	Completion completionCmd `cmd:"" help:"Print a script that completes commands and flags."`
	Man        manCmd        `cmd:"" help:"Print the manual page."`
	Bench      benchCmd      `cmd:"" help:"Measure deliveries, latency and cost on this machine, with your database and in a schema of its own."`
	Version    versionCmd    `cmd:"" help:"Show the version of this program."`

	BenchLoad benchLoadCmd `cmd:"" hidden:"" help:"The producers of bench, in a process of their own."`
}

// configFlag names the configuration file, for every command that reads one.
type configFlag struct {
	Config string `short:"c" placeholder:"FILE" help:"Configuration file. Default: $OUTBOX_CONFIG, or outbox-relay.yaml if it exists."`
}

// databaseFlags are those of commands that need nothing but the database.
type databaseFlags struct {
	configFlag
	Schema string `placeholder:"NAME" help:"Schema that holds the tables. Default: the first of the search_path."`
}

// settingFlags are the settings that are worth changing for one start. Secrets have none: others can read them in the
// list of processes.
type settingFlags struct {
	databaseFlags
	Name           string `placeholder:"NAME" help:"Name under which operators see this relay. Default: the host's."`
	DestinationURL string `placeholder:"URL" help:"Destination of every event type."`
	PollInterval   string `placeholder:"5s" help:"How long an idle relay waits before it looks by itself."`
	Lease          string `placeholder:"60s" help:"How long a claim holds at most."`
	DrainTimeout   string `placeholder:"20s" help:"How long a stop waits for requests in flight."`
	MaxInFlight    string `placeholder:"256" help:"Concurrent requests over all destinations."`
	Timeout        string `placeholder:"10s" help:"Timeout of one request."`
	LogLevel       string `placeholder:"info" help:"debug, info, warn or error."`
	LogFormat      string `placeholder:"auto" help:"auto, json or console."`
}

// An invocation is what a command has to work with.
type invocation struct {
	Main
	ctx     context.Context   // ends with the first signal
	aborted <-chan struct{}   // closed by the second
	flags   map[string]string // given on the command line, by name
}

// command parses the arguments and runs what they name.
func (m Main) command(ctx context.Context, aborted <-chan struct{}, args []string) (err error) {
	if len(args) == 0 {
		fmt.Fprint(m.Stderr, overview, "\n")
		return exitError{code: exitUsage, err: errors.New("no command given")}
	}
	if args[0] == "--version" {
		args[0] = "version"
	}
	if args[0] == "help" {
		args = append(slices.Clone(args[1:]), "--help")
	}
	// Kong ends the process after --help; here it ends this function.
	type helpShown struct{}
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(helpShown); !ok {
				panic(r)
			}
		}
	}()
	var g grammar
	parser, err := kong.New(&g,
		kong.Name("outbox-relay"),
		kong.Writers(m.Stdout, m.Stderr),
		kong.Exit(func(int) { panic(helpShown{}) }),
		kong.Help(func(options kong.HelpOptions, kctx *kong.Context) error {
			if kctx.Selected() == nil && kctx.Command() == "" {
				_, err := io.WriteString(m.Stdout, overview)
				return err
			}
			return kong.DefaultHelpPrinter(options, kctx)
		}),
	)
	if err != nil {
		return err
	}
	kctx, err := parser.Parse(args)
	if err != nil {
		command := "outbox-relay"
		if parse := new(kong.ParseError); errors.As(err, &parse) && parse.Context.Command() != "" {
			command += " " + parse.Context.Command()
		}
		return exitError{code: exitUsage, err: fmt.Errorf("%w (see: %s --help)", err, command)}
	}
	inv := &invocation{Main: m, ctx: ctx, aborted: aborted, flags: map[string]string{}}
	for _, flag := range kctx.Flags() {
		if flag.Set {
			inv.flags[flag.Name] = fmt.Sprint(kctx.FlagValue(flag))
		}
	}
	return kctx.Run(inv)
}

// load reads the configuration; see [loadConfig].
func (inv *invocation) load(sections ...string) *config {
	hostname, _ := os.Hostname() // only a default, and config show says so
	return loadConfig(sources{env: inv.Env, flags: inv.flags, hostname: hostname}, sections...)
}

// config reads the configuration and prints its warnings. Mistakes are an error.
func (inv *invocation) config(sections ...string) (*config, error) {
	c := inv.load(sections...)
	for _, w := range c.Warnings {
		fmt.Fprintf(inv.Stderr, "warning: %s\n", w)
	}
	return c, c.Err()
}

// exitError is an error that decides the exit code.
type exitError struct {
	code int
	err  error
}

func (e exitError) Error() string { return e.err.Error() }
func (e exitError) Unwrap() error { return e.err }

// report prints an error on stderr, so that no exit code but 0 stands alone, and returns the code.
func (m Main) report(err error) int {
	if err == nil {
		return 0
	}
	var exit exitError
	var mistakes settings.Error
	switch {
	case errors.As(err, &mistakes):
		fmt.Fprintln(m.Stderr, mistakes)
		return exitConfig
	case errors.As(err, &exit):
	case errors.Is(err, pg.ErrPooler):
		exit.code = exitConfig
	case errors.Is(err, pg.ErrSchema), errors.Is(err, inboxops.ErrSchema):
		exit.code = exitSchema
	case refused(err) != "":
		exit.code, err = exitConfig, fmt.Errorf("%s: %w", refused(err), err)
	case unreachable(err):
		exit.code, err = exitDatabase, fmt.Errorf("the database cannot be reached: %w", err)
	default:
		exit.code, err = exitFailed, withLackingRight(err)
	}
	fmt.Fprintf(m.Stderr, "outbox-relay: %s\n", oneLine(err.Error()))
	return exit.code
}

// refused says what the server has against a login, which another attempt does not change; empty: nothing.
func refused(err error) string {
	var connect *pgconn.ConnectError
	var server *pgconn.PgError
	if !errors.As(err, &connect) || !errors.As(err, &server) {
		return ""
	}
	switch server.Code {
	case "28P01", "28000": // invalid_password, invalid_authorization_specification
		return "the database refuses this login; check user and password in database.url, and pg_hba.conf"
	case "3D000": // invalid_catalog_name
		return "there is no such database; check its name in database.url"
	case "42501": // insufficient_privilege
		return "this login may not connect to the database; GRANT CONNECT ON DATABASE to it"
	case "08P01": // protocol_violation, as which PgBouncer reports most of what it does not like
		if strings.Contains(server.Message, "startup parameter") {
			return "a connection pooler stands before the database; set database.listen_url to a direct connection"
		}
	}
	return ""
}

// withLackingRight adds which right the login of a command lacks, where the error does not say so itself.
func withLackingRight(err error) error {
	var server *pgconn.PgError
	switch {
	case errors.As(err, &server) && server.Code == "42P01": // undefined_table
		return fmt.Errorf("%w; the tables are not where this login looks: run outbox-relay migrate up, or name their schema with --schema", err)
	case !errors.As(err, &server) || server.Code != "42501" || strings.Contains(strings.ToLower(err.Error()), "grant "): // insufficient_privilege
		return err
	case strings.Contains(server.Message, "for schema"), strings.Contains(server.Message, "for database"), strings.HasPrefix(server.Message, "must be owner"):
		return fmt.Errorf("%w; migrate as the owner of the tables, who needs CREATE on the schema (on the database, to make a schema)", err)
	}
	return fmt.Errorf("%w; this login needs a role of migrations/roles.sql: outbox_reader to look, outbox_relay to change something; only the owner of the tables migrates", err)
}

// unreachable reports whether err means that the database did not answer, or refused to talk.
func unreachable(err error) bool {
	var connect *pgconn.ConnectError
	var server *pgconn.PgError
	switch {
	case errors.As(err, &connect), errors.Is(err, io.ErrUnexpectedEOF), pgconn.Timeout(err):
		return true
	case errors.As(err, &server):
		// 08: connection exceptions; 57P01 to 57P03: it is shutting down or starting up.
		return strings.HasPrefix(server.Code, "08") || strings.HasPrefix(server.Code, "57P0")
	}
	return false
}

// oneLine joins the lines of a text and drops repeated ones: pgx tells of every address and TLS mode that it tried.
func oneLine(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line != "" && (len(lines) == 0 || lines[len(lines)-1] != line) {
			lines = append(lines, line)
		}
	}
	joined := strings.Join(lines, "; ")
	return printable(strings.ReplaceAll(joined, ":; ", ": "))
}
