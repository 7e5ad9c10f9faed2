package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// The relays' settings, other than where to read and where to send.
var relaySettings = []string{
	"OUTBOX_DEFAULTS_RETRY_SCHEDULE=500ms,1s,2s", // the standard one would outlast the audience
	"OUTBOX_DEFAULTS_TIMEOUT=1500ms",
	"OUTBOX_RELAY_LEASE=60s", // the default: what is taken over sooner is not owed to short leases
}

// The shape of the play. Most invoices come at an even pace; the rest in acts: many at once, and a
// relay is killed in their midst.
const (
	acts       = 3
	actShare   = 0.1 // of all invoices, in each act
	rolledBack = 0.1
	plainSQL   = 0.2
)

// play is one performance.
type play struct {
	options
	*log.Logger
	began   time.Time
	stage   *stage
	relays  []*process.Unit
	slowest time.Duration // takeover
}

func newPlay(o options, w io.Writer) *play {
	if o.Seed == 0 {
		o.Seed = rand.Uint64N(1_000_000) + 1
	}
	return &play{options: o, Logger: log.New(w, "", 0), began: time.Now()}
}

// say tells of something that has just happened.
func (p *play) say(format string, args ...any) {
	p.Printf("%6.1fs  %s", time.Since(p.began).Seconds(), fmt.Sprintf(format, args...))
}

// run plays, checks, and leaves nothing behind. A broken promise is an error.
func (p *play) run(ctx context.Context) (err error) {
	p.say("seed %d (repeat with --seed %d)", p.Seed, p.Seed)
	if p.stage, err = openStage(ctx, p.Relay, p.Seed); err != nil {
		return err
	}
	defer func() { err = errors.Join(p.stage.Reason(err), p.stage.close()) }()
	p.say("PostgreSQL runs in %s; outbox-relay migrate up: finance (outbox), logistics (inbox)", p.stage.Server.Dir())
	for _, step := range []func() error{p.enter, p.perform, p.stage.gather} {
		if err := step(); err != nil {
			return err
		}
	}
	figures, rules, err := check(ctx, p.stage.finance)
	if err != nil {
		return err
	}
	p.report(figures, rules)
	if p.Keep {
		p.keep()
	}
	if slices.ContainsFunc(rules, func(r rule) bool { return len(r.broken) > 0 }) {
		return errors.New("a promise is broken, see above; the same --seed repeats the invoices and faults")
	}
	return nil
}

// enter starts the receiver and the relays.
func (p *play) enter() error {
	p.stage.absence = p.Absence
	p.stage.onDeath = func() { p.say("logistics died between its commit and its answer; the next one takes its place") }
	invoices := p.Events * 9 / 10
	if err := p.stage.openReceiver(faults{Late: 0.03, Refuse: 0.03, Lose: 0.02}, invoices/4, invoices/3); err != nil {
		return err
	}
	p.say("logistics listens on %s; it will fail, and die after a commit; answers will be late or lost", *p.stage.network.receiver.Load())
	for i := range 2 {
		u, err := p.stage.openRelay(fmt.Sprintf("relay-%d", i+1), relaySettings...)
		if err != nil {
			return err
		}
		p.relays = append(p.relays, u)
	}
	p.say("relay-1 and relay-2 run, with waits of 500ms, 1s, 2s between attempts (in production 5s, 30s, 5m, 30m, 4h)")
	return nil
}

// perform lets finance issue invoices while relays are killed, and returns when all is delivered.
func (p *play) perform() error {
	inAct := int(float64(p.Events) * actShare)
	steady := p.Events - acts*inAct
	perSecond := float64(steady) / p.Steady.Seconds()
	p.say("finance issues invoices, %.0f a second; one in ten is rolled back, one in five enqueued by plain SQL", perSecond)
	issued := p.issue(order{Prefix: "INV", Invoices: steady, PerSecond: perSecond})
	for n := range acts {
		if err := sleep.For(p.stage.Ctx, p.Pause); err != nil {
			return err
		}
		if err := p.act(n+1, inAct); err != nil {
			return err
		}
	}
	if err := <-issued; err != nil {
		return err
	}
	p.say("finance is done; waiting until nothing is pending")
	defer p.stage.network.calm.Store(true)
	return p.stage.drained(drainPatience)
}

// issue lets finance issue invoices meanwhile.
func (p *play) issue(o order) <-chan error {
	o.Rollback, o.PlainSQL = rolledBack, plainSQL
	return p.stage.issueMeanwhile(o)
}

// act is the end of one month: many invoices at once, and a relay that dies in the midst of them.
func (p *play) act(number, invoices int) error {
	issued := p.issue(order{Prefix: fmt.Sprintf("END%d", number), Invoices: invoices})
	victim, other := p.relays[number%2], p.relays[(number+1)%2]
	t, holding, err := p.stage.killBusy(victim, invoices/15, time.Second)
	if err != nil {
		return err
	}
	p.say("month's end %d: %d invoices at once; kill -9 %s with %d of its deliveries in flight", number, invoices, victim.Role, holding)
	if err := p.stage.takenOver(t); err != nil {
		return err
	}
	p.slowest = max(p.slowest, t.took)
	p.say("%s has taken over the %d that it left behind, within %s", other.Role, t.claims, short(t.took))
	return <-issued
}

// keep leaves everything running until the play is interrupted.
func (p *play) keep() {
	psql := "psql"
	if _, err := exec.LookPath(psql); err != nil {
		psql = filepath.Join(p.stage.Server.BinDir(), psql)
	}
	p.Printf("Everything still runs, without faults. Ctrl-C ends it. In another terminal:")
	p.Printf("\n  FINANCE='%s'\n  LOGISTICS='%s'\n\n", p.stage.Server.DSN(financeName), p.stage.Server.DSN(logisticsName))
	p.Printf("  %s \"$FINANCE\" -c \"INSERT INTO outbox (event_type, payload, idempotency_key)", psql)
	p.Printf("    VALUES ('%s', json_build_object('invoice', 'MINE-1', 'customer', 'me'), 'MINE-1-issued')\"", eventType)
	p.Printf("  %s \"$LOGISTICS\" -c \"TABLE shipments ORDER BY id DESC LIMIT 5\"", psql)
	p.Printf("  OUTBOX_DATABASE_URL=\"$FINANCE\" %s status\n\n", p.Relay)
	for _, u := range append([]*process.Unit{p.stage.receiver}, p.relays...) {
		_, running := u.Current()
		p.Printf("  kill -9 %-8d # %s; it is started again", running.PID, u.Role)
	}
	p.Print()
	<-p.stage.Ctx.Done()
}
