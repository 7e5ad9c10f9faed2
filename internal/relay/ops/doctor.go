package ops

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// Levels of a [Finding].
const (
	// LevelError is of what loses events, or keeps them from being delivered.
	LevelError = "error"
	// LevelWarning is of what works, and will not for ever, or not as well as it could.
	LevelWarning = "warning"
)

// A Finding is one thing that [Outbox.Examine] found to be wrong.
type Finding struct {
	Check  string `json:"check"` // one of [Checkup.Checks]
	Level  string `json:"level"`
	Text   string `json:"text"`
	Remedy string `json:"remedy"` // what fixes it: commands, each on its line, a statement, or a setting
	// Commands are those of the remedy; nil where it is something else.
	Commands []string `json:"commands,omitempty"`
}

// A Checkup is what an examination looked at, and what it found.
type Checkup struct {
	Checks   []string  `json:"checks"`
	NotMade  []string  `json:"not_made,omitempty"` // checks that could not be made, as a finding says why
	Findings []Finding `json:"findings"`
	// FindingsLeft counts what was found beside [MaxListed] findings of the same check and level.
	FindingsLeft int `json:"findings_left"`
}

// Bounded returns the checkup with at most [MaxListed] findings of each check and level.
func (c Checkup) Bounded() Checkup {
	kinds := map[[2]string]int{}
	all := c.Findings
	c.Findings = []Finding{}
	for _, f := range all {
		if kind := [2]string{f.Check, f.Level}; kinds[kind] < MaxListed {
			kinds[kind]++
			c.Findings = append(c.Findings, f)
		}
	}
	c.FindingsLeft = len(all) - len(c.Findings)
	return c
}

// Failed reports whether a finding is an error.
func (c Checkup) Failed() bool {
	return slices.ContainsFunc(c.Findings, func(f Finding) bool { return f.Level == LevelError })
}

// ExamineConfig is what an examination compares the database with.
type ExamineConfig struct {
	// Environment of the relays, see [Outbox.Identity].
	Environment string
	// Destinations that the relays are configured with. Each is connected to, without a request.
	Destinations []post.Destination
	// Egress of the relays.
	Egress post.Egress
	// OldestTransaction is how old a transaction may become. 0: 5 min.
	OldestTransaction time.Duration
	// Session returns the error of [pg.CheckSession] for a connection made as a relay's. nil: that
	// is not checked.
	Session func(ctx context.Context) error
}

// Limits of what is still healthy.
const (
	clockWarning   = 5 * time.Second
	clockError     = 4 * time.Minute // receivers refuse signatures that are 5 minutes old
	deadRows       = 10_000
	reachTimeout   = 5 * time.Second
	oldestDefault  = 5 * time.Minute
	rangeWarning   = 2 * time.Minute // a range is open for about a second
	oldestPostgres = 140_000
)

// An examination collects findings. Its methods are called one after the other.
type examination struct {
	Checkup
	o   *Outbox
	cfg ExamineConfig
	// damage is what of the schema is not as the migrations made it.
	damage []damage
}

// Examine looks for everything that keeps relays from working well on this database, and changes
// nothing. Without a schema that this build works with, or a database that answers, it makes the
// checks that need neither. An error means that ctx has ended.
func (o *Outbox) Examine(ctx context.Context, cfg ExamineConfig) (Checkup, error) {
	x := &examination{o: o, cfg: cfg, Checkup: Checkup{Findings: []Finding{}}}
	if x.cfg.OldestTransaction == 0 {
		x.cfg.OldestTransaction = oldestDefault
	}
	steps := []struct {
		check string
		run   func(context.Context) error
	}{
		{"server", x.server},
		{"session", x.session},
		{"transactions", x.transactions},
		{"locks", x.locks},
		{"schema", x.schema},
		{"rights", x.rights},
		{"indexes", x.damaged("index")},
		{"constraints", x.damaged("constraint", "domain")},
		{"triggers", x.damaged("trigger")},
		{"functions", x.damaged("function")},
		{"vacuum", x.vacuum},
		{"identity", x.identity},
		{"intake", x.intake},
		{"events", x.events},
		{"deliveries", x.deliveries},
		{"destinations", x.destinations},
	}
	ended := false
	for _, s := range steps {
		if ended && s.check != "destinations" { // which needs no database
			x.NotMade = append(x.NotMade, s.check)
			continue
		}
		x.Checks = append(x.Checks, s.check)
		within, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
		err := s.run(within)
		cancel()
		if errors.Is(err, errEnd) {
			ended = true
		} else if pg.HasCode(err, "42501") { // insufficient_privilege
			x.add(s.check, LevelError, "this login may not look: "+err.Error(), "grant it outbox_reader or outbox_relay of migrations/roles.sql")
		} else if ctx.Err() != nil {
			return x.Checkup, err
		} else if err != nil {
			ended = true
			x.add(s.check, LevelError, "the database could not be asked: "+plain.Clip(err.Error()), "see whether it runs, and whether database.url leads to it")
		}
	}
	return x.Checkup, nil
}

// errEnd ends an examination that can find nothing more.
var errEnd = errors.New("nothing more can be examined")

func (x *examination) add(check, level, text, remedy string) {
	x.Findings = append(x.Findings, Finding{Check: check, Level: level, Text: text, Remedy: remedy})
}

func (x *examination) server(ctx context.Context) error {
	before := time.Now()
	s, err := x.o.serverState(ctx)
	if err != nil {
		return err
	}
	took := time.Since(before)
	if s.Number < oldestPostgres {
		x.add("server", LevelError, fmt.Sprintf("PostgreSQL %s is too old", s.Version), "upgrade it to 14 or later")
	}
	if err := pg.CheckEncoding(s.Encoding); err != nil {
		text, remedy, _ := strings.Cut(err.Error(), "; ")
		x.add("server", LevelError, text, remedy)
	}
	if s.InRecovery {
		x.add("server", LevelError, "this server is a standby: nothing can be claimed", "let database.url lead to the primary (target_session_attrs=read-write)")
	} else if s.ReadOnly {
		x.add("server", LevelError, "transactions are read-only: nothing can be claimed", "run: ALTER DATABASE or ALTER ROLE … RESET default_transaction_read_only")
	}
	if !s.Fsync || !s.FullPageWrites {
		x.add("server", LevelError, "fsync or full_page_writes is off: a crash of the server loses committed events, or the whole database",
			"run: ALTER SYSTEM SET fsync = on; ALTER SYSTEM SET full_page_writes = on; SELECT pg_reload_conf()")
	}
	if !s.SyncCommit {
		x.add("server", LevelWarning, "synchronous_commit is off by default: a crash of the server loses events that their producers have committed",
			"run: ALTER SYSTEM RESET synchronous_commit, or ALTER DATABASE … RESET synchronous_commit")
	}
	if !s.Autovacuum {
		x.add("server", LevelError, "autovacuum is off: claims become slower with every delivery", "run: ALTER SYSTEM SET autovacuum = on; SELECT pg_reload_conf()")
	}
	// The server took its time somewhere within the round trip.
	apart := max(before.Sub(s.Now), s.Now.Sub(before.Add(took)))
	if apart > clockWarning {
		level := LevelWarning
		if apart > clockError {
			level = LevelError
		}
		x.add("server", level, fmt.Sprintf("the clocks of this host and of the database are %s apart; receivers refuse signatures that are 5 minutes off", apart.Round(time.Second)),
			"synchronise both with NTP")
	}
	return nil
}

func (x *examination) session(ctx context.Context) error {
	if x.cfg.Session == nil {
		return nil
	}
	err := x.cfg.Session(ctx)
	if errors.Is(err, pg.ErrPooler) {
		x.add("session", LevelWarning, "a connection pooler stands before the database: relays hear of new events by polling, and of a dead relay by its lease",
			"set database.listen_url to a direct connection")
		return nil
	}
	if errors.Is(err, pg.ErrReadOnly) || errors.Is(err, pg.ErrEncoding) { // the server's state says which
		return nil
	}
	return err
}

func (x *examination) transactions(ctx context.Context) error {
	old, err := x.o.oldTransactions(ctx, x.cfg.OldestTransaction)
	for _, t := range old {
		age := plain.Span(time.Duration(t.Seconds * float64(time.Second)))
		if t.PID == 0 {
			x.add("transactions", LevelWarning, fmt.Sprintf("the prepared transaction %q has been open for %s: VACUUM removes nothing that died since", t.Name, age),
				"run: COMMIT PREPARED or ROLLBACK PREPARED "+t.Name)
			continue
		}
		x.add("transactions", LevelWarning, fmt.Sprintf("process %d (application %q, %s) has had a transaction open for %s: VACUUM removes nothing that died since",
			t.PID, t.Name, t.State, age), fmt.Sprintf("let its owner end it, or: SELECT pg_terminate_backend(%d)", t.PID))
	}
	return err
}

// locks checks who keeps relays from the tables. What keeps them from reading ends the examination,
// which would wait as they do.
func (x *examination) locks(ctx context.Context) error {
	held, err := x.o.tableLocks(ctx)
	for _, l := range held {
		does := "holds " + l.Mode + " on " + l.Table
		if !l.Granted {
			does = fmt.Sprintf("waits for %s on %s behind %v, and others behind it", l.Mode, l.Table, l.Behind)
		}
		x.add("locks", LevelError, fmt.Sprintf("process %d (application %q, %s) %s, in a transaction of %s: relays wait for it",
			l.PID, l.Name, l.State, does, plain.Span(time.Duration(l.Seconds*float64(time.Second)))), fmt.Sprintf("let its owner end it, or: SELECT pg_terminate_backend(%d)", l.PID))
		if l.Mode == "AccessExclusiveLock" {
			err = errEnd
		}
	}
	return err
}

func (x *examination) vacuum(ctx context.Context) error {
	tables, err := x.o.tableHealth(ctx)
	for _, t := range tables {
		if t.AutovacuumOff {
			x.add("vacuum", LevelError, fmt.Sprintf("autovacuum is off for %s: claims become slower with every delivery", t.Name), "run: ALTER TABLE "+t.Name+" RESET (autovacuum_enabled)")
		}
		if t.Dead > deadRows && t.Dead > t.Live {
			x.add("vacuum", LevelWarning, fmt.Sprintf("%s has %d dead rows beside %d live ones", t.Name, t.Dead, t.Live), "run: VACUUM (ANALYZE) "+t.Name)
		}
	}
	return err
}

func (x *examination) identity(ctx context.Context) error {
	report, err := x.o.Identity(ctx, x.cfg.Environment)
	if err == nil && report.Foreign != "" {
		x.add("identity", LevelError, "no relay takes events: "+report.Foreign, "outbox-relay identity show")
		return nil
	}
	if reason := report.Reason(); err == nil && reason != "" {
		x.add("identity", LevelError, "relays are quarantined here and do nothing: "+reason, "outbox-relay identity show")
	}
	return err
}

// intake checks what keeps relays from taking events, or what they have taken from being sent.
func (x *examination) intake(ctx context.Context) error {
	if err := intake.CheckOrigin(ctx, x.o.pool); errors.Is(err, intake.ErrNoIntake) {
		x.add("intake", LevelError, "the table outbox_range or outbox_intake is empty: no relay takes events", "restore both tables from a backup")
		return nil
	}
	expressions, err := x.o.xidDefault(ctx)
	if err != nil {
		return err
	}
	if len(expressions) != 1 || !strings.Contains(expressions[0], "outbox_wake()") || !strings.Contains(expressions[0], "pg_current_xact_id()") {
		x.add("intake", LevelError, fmt.Sprintf("the column xid of outbox has not the default of the migrations (%s): no relay finds new events", strings.Join(expressions, ", ")),
			"give it the default that migrations/outbox/00001_event.sql has")
	}
	ranges, err := x.o.oldRange(ctx, rangeWarning)
	for _, r := range ranges {
		age := plain.Span(time.Duration(r.Seconds * float64(time.Second)))
		text := fmt.Sprintf("relay %d %s has had events in hand for %s (range %d)", r.RelayID, r.Name, age, r.Seq)
		switch {
		case r.Alive:
			x.add("intake", LevelWarning, text, "see the log of that relay; another one takes the events over once it is stopped")
		case r.Name != "":
			x.add("intake", LevelError, text+", and is silent", "stop that relay, and start one that takes the events over: outbox-relay run")
		default:
			x.add("intake", LevelError, fmt.Sprintf("relay %d had events in hand when it ended, %s ago, and no other has taken them over (range %d)", r.RelayID, age, r.Seq),
				"start one: outbox-relay run")
		}
	}
	return err
}

func (x *examination) events(ctx context.Context) error {
	lost, err := x.o.recentUndelivered(ctx)
	if lost.Events > 0 {
		x.add("events", LevelError, fmt.Sprintf("%s no deliveries, so that nothing sends them; the first is event %d", counted(lost.Events, "event has", "events have"), lost.FirstEventID),
			"outbox-relay events create-deliveries")
	}
	if err != nil {
		return err
	}
	missing, err := x.o.recentMissing(ctx)
	for _, m := range missing {
		x.add("events", LevelWarning, fmt.Sprintf("%s no delivery to %q, though others of their type before and after have one; the first is event %d. Were rows of outbox_delivery deleted, or routes changed meanwhile?",
			counted(m.Events, "event has", "events have"), m.Destination, m.FirstEventID), "see docs/operations.md, A delivery was deleted")
	}
	return err
}

// deliveries takes over what status advises.
func (x *examination) deliveries(ctx context.Context) error {
	s, err := x.o.Status(ctx, x.cfg.Environment)
	if err != nil {
		return err
	}
	for _, a := range s.Advice {
		level := LevelWarning
		switch a.Rule {
		case alert.RuleQuarantined:
			if s.Quarantined != "" { // identity says so
				continue
			}
		case alert.RuleNoRelay, alert.RuleUnserved:
			level = LevelError
		case alert.RuleUntaken: // it would advise to run what runs
			a.Commands = []string{"outbox-relay relays    # who lives, and what each has in flight"}
		}
		x.Findings = append(x.Findings, Finding{Check: "deliveries", Level: level, Text: a.String(), Remedy: strings.Join(a.Commands, "\n"), Commands: a.Commands})
	}
	if !slices.ContainsFunc(s.Relays, RelayStatus.Alive) {
		return nil
	}
	served := map[string]bool{}
	for _, d := range s.Destinations {
		served[d.Destination] = d.Served
	}
	for _, d := range x.cfg.Destinations {
		if !served[d.Name] {
			x.add("deliveries", LevelWarning, fmt.Sprintf("no running relay has the destination %q of this configuration", d.Name), "reload the relays with it (SIGHUP)")
		}
	}
	return nil
}

// destinations connects to each, all at once.
func (x *examination) destinations(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reachTimeout)
	defer cancel()
	for i, reached := range post.ReachAll(ctx, x.cfg.Destinations, x.cfg.Egress) {
		name := reached.Destination
		for _, warning := range reached.Warnings {
			x.add("destinations", LevelWarning, fmt.Sprintf("%q works, but %s", name, plain.Clip(warning)), "change that, or destinations."+name)
		}
		if err := reached.Err; err != nil {
			remedy := alert.Repair(name, alert.ReasonOf(err.Error()), err.Error(), plainly)
			if x.cfg.Destinations[i].IsLog() && !alert.NamesLog(err.Error()) { // other errors of a log say what to do
				remedy = fmt.Sprintf("Do what the error says, or correct destinations.%s. Nothing is lost meanwhile: its events wait.", name)
			}
			x.add("destinations", LevelError, fmt.Sprintf("%q cannot be reached from here: %s", name, plain.Clip(err.Error())), strings.TrimSpace(remedy))
		}
		if len(x.cfg.Destinations[i].SigningSecrets) == 0 {
			x.add("destinations", LevelWarning, fmt.Sprintf("requests to %q are not signed: its receiver cannot tell them from forged ones", name),
				fmt.Sprintf("set destinations.%s.signing_secrets", name))
		}
	}
	return nil
}
