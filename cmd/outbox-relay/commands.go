package main

import (
	"github.com/outbox-relay/outbox-relay/internal/cli/config"

	"github.com/outbox-relay/outbox-relay/internal/cli/alerts"
	"github.com/outbox-relay/outbox-relay/internal/cli/archive"
	"github.com/outbox-relay/outbox-relay/internal/cli/bench"
	"github.com/outbox-relay/outbox-relay/internal/cli/destinations"
	"github.com/outbox-relay/outbox-relay/internal/cli/drill"
	"github.com/outbox-relay/outbox-relay/internal/cli/events"
	"github.com/outbox-relay/outbox-relay/internal/cli/identity"
	"github.com/outbox-relay/outbox-relay/internal/cli/inbox"
	"github.com/outbox-relay/outbox-relay/internal/cli/listen"
	"github.com/outbox-relay/outbox-relay/internal/cli/migrate"
	"github.com/outbox-relay/outbox-relay/internal/cli/reconcile"
	"github.com/outbox-relay/outbox-relay/internal/cli/run"
	"github.com/outbox-relay/outbox-relay/internal/cli/status"
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
  outbox-relay reconcile --destination NAME --url URL    did everything delivered take effect, exactly once?
  outbox-relay pause | resume NAME                       stop sending to a destination; continue
  outbox-relay relays | routes list | routes test TYPE   who delivers; where events go
  outbox-relay audit                                     what operators changed and revealed: who, when, how much
  outbox-relay archive run                               archive what is settled, drop and prune what is old, now
  outbox-relay migrate roles | down | status             grant rights to roles; revert the last migration; list them
  outbox-relay alerts test                               send a test alert to every channel
  outbox-relay identity show | accept | discard-pending  after a move, or on a copy of the database: who may work here
  outbox-relay config init | check | show                write a file; find every mistake; print what is in effect, and why
  outbox-relay inbox status | list | show | replay | ignore | prune    the same for a receiver, at its own database
  outbox-relay events tail                               what happens from now on
  outbox-relay send TYPE | listen                        insert one event; receive events and print them
  outbox-relay drill URL                                 try a receiver for tests as the real world does; find its mistakes
  outbox-relay completion bash|zsh|fish | man            completion for a shell; the manual page
  outbox-relay bench                                     how fast it is here, and what limits it
  outbox-relay version

Everything can also stand in outbox-relay.yaml. More: outbox-relay <command> --help
Exit codes: 0 ok, 1 failed, 2 usage, 3 configuration, 4 database unreachable, 5 schema mismatch, 6 found something, 130 interrupted
`

// grammar is the command line.
type grammar struct {
	Run        run.Command         `cmd:"" help:"Deliver events until told to stop."`
	Migrate    migrate.Command     `cmd:"" help:"Create, upgrade, revert or list the tables."`
	Status     status.Command      `cmd:"" help:"Show what waits, what failed, who delivers."`
	Events     events.Command      `cmd:"" help:"List deliveries, or show one event."`
	Explain    events.Explain      `cmd:"" help:"Tell the history of one event, and why it waits."`
	Send       events.Send         `cmd:"" help:"Insert one event."`
	Listen     listen.Command      `cmd:"" help:"Receive events and print them."`
	Drill      drill.Command       `cmd:"" help:"Try a receiver for tests as the real world does, and say what it does wrong; exit 6 if there is something."`
	Doctor     status.Doctor       `cmd:"" help:"Find what is wrong with configuration, database and destinations; exit 6 if there is an error."`
	Alerts     alerts.Command      `cmd:"" help:"Try the alert channels, acknowledge alerts and silence them."`
	Replay     events.Replay       `cmd:"" help:"Send failed, delivered or discarded deliveries again."`
	Retry      events.Retry        `cmd:"" help:"Attempt now what waits for its next attempt."`
	Discard    events.Discard      `cmd:"" help:"Give pending, parked or failed deliveries up."`
	Reconcile  reconcile.Command   `cmd:"" help:"Compare what was delivered with what a receiver has; exit 6 if they differ."`
	Pause      destinations.Pause  `cmd:"" help:"Send nothing to a destination until it is resumed."`
	Resume     destinations.Resume `cmd:"" help:"End a pause; with --reset-breaker a hold too."`
	Relays     status.Relays       `cmd:"" help:"List the relays that run."`
	Audit      status.Audit        `cmd:"" help:"List what operators changed and revealed."`
	Routes     destinations.Routes `cmd:"" help:"List the stored routes, or show where an event type goes."`
	Archive    archive.Command     `cmd:"" help:"Archive, drop and prune by hand what relays do every night."`
	Config     config.Command      `cmd:"" help:"Check or show the configuration."`
	Identity   identity.Command    `cmd:"" help:"Compare this database with what relays were accepted on, and decide about a copy."`
	Inbox      inbox.Command       `cmd:"" help:"Look at a receiver's events, work them again, ignore or forget them."`
	Completion completionCmd       `cmd:"" help:"Print a script that completes commands and flags."`
	Man        manCmd              `cmd:"" help:"Print the manual page."`
	Bench      bench.Command       `cmd:"" help:"Measure deliveries, latency and cost on this machine, with your database and in its own schema."`
	Version    versionCmd          `cmd:"" help:"Show the version of this program."`

	Alert     alerts.Command    `cmd:"" hidden:"" help:"The command alerts, under the name of one."`
	Complete  completeCmd       `cmd:"" hidden:"" help:"Names for the script that completion prints."`
	BenchLoad bench.LoadCommand `cmd:"" hidden:"" help:"The producers of bench, in their own process."`
}
