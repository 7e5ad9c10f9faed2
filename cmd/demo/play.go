package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"time"
)

// The relays' settings, other than where to read and where to send.
var relaySettings = []string{
	"OUTBOX_RETRY_SCHEDULE=500ms,1s,2s", // the standard one would outlast the audience
	"OUTBOX_TIMEOUT=1500ms",
	"OUTBOX_LEASE=60s", // the default: what is taken over sooner is not owed to short leases
}

// The faults of the receiver, in shares of the requests.
var receiverFaults = faults{Late: 0.03, Refuse: 0.03, Lose: 0.02}

// The shape of the play. Most invoices come at an even pace; the rest in acts: many at once, and a
// relay is killed in their midst.
const (
	acts       = 3
	actShare   = 0.1 // of all invoices, in each act
	rolledBack = 0.1
	plainSQL   = 0.2
)

// A tempo is how fast the play is played.
type tempo struct {
	steady  time.Duration // over which the even pace is kept
	pause   time.Duration // before each act
	absence time.Duration // of a killed relay
}

// unhurried leaves time to read along.
var unhurried = tempo{steady: 13 * time.Second, pause: 3 * time.Second, absence: 1500 * time.Millisecond}

// play is one performance.
type play struct {
	options
	tempo
	*narrator
	stage   *stage
	relays  []*unit
	slowest takeover
}

func newPlay(o options, w io.Writer) *play {
	if o.Seed == 0 {
		o.Seed = rand.Uint64N(1_000_000) + 1
	}
	return &play{options: o, tempo: unhurried, narrator: newNarrator(w)}
}

// run plays, checks, and leaves nothing behind. A broken promise is an error.
func (p *play) run(ctx context.Context) (err error) {
	p.say("seed %d (repeat with --seed %d)", p.Seed, p.Seed)
	stage, err := openStage(ctx, p.Relay, p.Seed)
	if err != nil {
		return err
	}
	p.stage, stage.absence = stage, p.absence
	stage.onCrash = func(string) { p.say("logistics died between its commit and its answer; the next one takes its port") }
	defer func() {
		if cause := context.Cause(stage.ctx); err != nil && cause != nil {
			err = cause // what came after it is only its consequence
		}
		err = errors.Join(err, stage.close())
	}()
	p.say("PostgreSQL runs in %s; outbox-relay migrate up: finance (outbox), logistics (inbox)", stage.server.Dir())
	if err := p.enter(); err != nil {
		return err
	}
	if err := p.perform(); err != nil {
		return err
	}
	verdict, err := p.judge()
	if err != nil {
		return err
	}
	if p.Keep {
		p.keep()
	}
	return verdict
}

// enter starts the receiver and the relays.
func (p *play) enter() error {
	invoices := p.Events * 9 / 10
	if err := p.stage.openReceiver(receiverFaults, invoices/4, invoices/3); err != nil {
		return err
	}
	p.say("logistics listens on %s; it will be late, fail, lose answers, and die after a commit", p.stage.history.address())
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
	perSecond := float64(steady) / p.steady.Seconds()
	p.say("finance issues invoices, %.0f a second; one in ten is rolled back, one in five enqueued by plain SQL", perSecond)
	issued := make(chan error, 1)
	p.stage.units.Go(func() {
		issued <- p.stage.issue(order{prefix: "INV", invoices: steady, perSecond: perSecond, rollback: rolledBack, plainSQL: plainSQL})
	})
	for n := range acts {
		select {
		case <-time.After(p.pause):
		case <-p.stage.ctx.Done():
			return context.Cause(p.stage.ctx)
		}
		if err := p.act(n+1, inAct); err != nil {
			return err
		}
	}
	if err := <-issued; err != nil {
		return err
	}
	p.say("finance is done; waiting until nothing is pending")
	if err := p.stage.drained(); err != nil {
		return err
	}
	return p.stage.behave()
}

// act is the end of one month: many invoices at once, and a relay that dies in the midst of them.
func (p *play) act(number, invoices int) error {
	issued := make(chan error, 1)
	p.stage.units.Go(func() {
		issued <- p.stage.issue(order{prefix: fmt.Sprintf("END%d", number), invoices: invoices, rollback: rolledBack, plainSQL: plainSQL})
	})
	victim := p.relays[number%len(p.relays)]
	life, _ := victim.current()
	holding := 0
	waiting := time.Now()
	if err := p.stage.poll(life+" to be busy", func(ctx context.Context) (busy bool, err error) {
		holding, err = p.stage.holding(ctx, life)
		return holding >= invoices/15 || time.Since(waiting) > time.Second, err
	}); err != nil {
		return err
	}
	k := p.stage.killRelay(victim)
	p.say("month's end %d: %d invoices at once; kill -9 %s with %d of its deliveries in flight", number, invoices, victim.role, holding)
	t, err := p.stage.takenOver(k)
	if err != nil {
		return err
	}
	if t.took >= p.slowest.took {
		p.slowest = t
	}
	p.say("%s has taken over the %d that it left behind, within %s", p.other(victim), t.claims, short(t.took))
	return <-issued
}

// other names the relays that are not u.
func (p *play) other(u *unit) string {
	var names []string
	for _, r := range p.relays {
		if r != u {
			names = append(names, r.role)
		}
	}
	return strings.Join(names, ", ")
}

// errBroken says that the table above it is bad news.
var errBroken = errors.New("a promise is broken, see above; the same --seed repeats the invoices and faults")

// judge compares the databases and prints the table. The verdict is nil when every promise was kept.
func (p *play) judge() (verdict, err error) {
	f, err := p.stage.gather()
	if err != nil {
		return nil, err
	}
	rules := f.check()
	p.table(f.figures(), p.slowest, rules)
	for _, r := range rules {
		if len(r.broken) > 0 {
			verdict = errBroken
		}
	}
	return verdict, nil
}
