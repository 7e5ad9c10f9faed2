package relay

import (
	"context"
	"errors"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/claim"
	"github.com/outbox-relay/outbox-relay/internal/relay/join"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/take"
	"github.com/outbox-relay/outbox-relay/internal/shortsleep"
)

// rescuedWindow is how long ago a delivery became due that is looked for at once when its relay has
// died. It covers what was live when the relay claimed it, and the request.
const rescuedWindow = 2 * lane.LiveWindow

// stepAgain is after which time a step of a turn is done again that some rows have failed.
const stepAgain = 5 * time.Second

// A claimer takes new events and claims rows that are due, when its agenda says so. It is one
// goroutine and owns all its fields.
type claimer struct {
	*progress
	presence     *session.Presence
	mailbox      *mailbox
	db           pg.Pool
	producers    *session.Producers
	log          zerolog.Logger
	pollInterval time.Duration
	woken        func(by Wake) // follows every wait; nil: nothing does
	idle         func()        // follows each declaration that there is nothing to do; nil: nothing does
	failed       func(operation string, err error)
	markClaims   func(since time.Time, err error) // follows each turn; since is when the first of those that fail began

	agenda   agenda.Agenda
	pace     agenda.Pace
	clock    pg.Clock
	breakers breakerKeeper
	lanes    *lane.Lanes
	taker    take.Taker
	joins    join.Keys
	rows     claim.Rows
	putOff   map[string]time.Time // steps that rows have failed, until when
	takeErr  error                // of the last take that some rows have failed; nil: none did
}

// run takes one turn after the other until ctx is done.
func (c *claimer) run(ctx context.Context) {
	failing := newBackoff()
	sleeper := shortsleep.New()
	defer sleeper.Close()
	timer := time.NewTimer(0)
	defer timer.Stop()
	var failingSince time.Time
	for ctx.Err() == nil {
		c.markTurn()
		began := time.Now()
		due, err := c.turn(ctx)
		claims := errors.Join(err, c.takeErr)
		switch {
		case claims == nil:
			failingSince = time.Time{}
		case failingSince.IsZero():
			failingSince = began
		}
		c.markClaims(failingSince, claims)
		wait, next := c.agenda.Next(time.Now())
		if err != nil {
			wait = failing.NextBackOff()
			c.failed("claim", err)
		} else {
			failing.Reset()
		}
		if line := c.log.Debug(); line.Enabled() {
			line.Stringer("due", due).Stringer("next", next).Float64("in_ms", wait.Seconds()*1000).Msg("claimer: turn")
		}
		switch {
		case wait >= shortsleep.Longest:
			timer.Reset(wait)
			select {
			case <-ctx.Done():
			case <-timer.C:
			case <-c.mailbox.token:
			}
		case wait > 0: // what is posted meanwhile is met right after it
			sleeper.Sleep(wait)
		}
		c.readMailbox(time.Now())
	}
}

// turn does once what is due. After an error all of it is due again.
func (c *claimer) turn(ctx context.Context) (due agenda.Cause, err error) {
	now := time.Now()
	relayID, alive := c.presence.Current()
	if c.presence.WasLost() || !alive || ctx.Err() != nil {
		// Without its session this relay's claims would look like a dead relay's. What it knows may
		// be of another server: the database may have failed over since.
		c.rows.Forget()
		c.taker.Forget()
		// What is due stays due, but not at once: an urgent cause would have one turn follow the
		// other until the database is back.
		c.agenda.At(c.agenda.Take(now)|agenda.CauseEntry, now.Add(agenda.TurnGap))
		return 0, nil
	}
	if err := c.prepare(ctx, now, relayID); err != nil {
		return 0, err
	}
	if c.becomeIdle(now) && c.idle != nil {
		defer c.idle() // after the poll that idleness begins with
	}
	c.plan(now)
	due = c.agenda.Take(now)
	if err = c.act(ctx, now, relayID, due); err != nil {
		c.agenda.At(due, now)
	}
	c.plan(time.Now())
	return due, err
}

// prepare writes whether producers notify and what the breakers have decided, and learns the
// database's time.
func (c *claimer) prepare(ctx context.Context, now time.Time, relayID int32) error {
	if err := c.arm(ctx, now); err != nil {
		return err
	}
	if err := c.breakers.writeDecisions(now, relayID); err != nil {
		return err
	}
	if c.clock.IsSet() {
		return nil
	}
	at, err := pg.ReadTime(ctx, c.db)
	if err == nil {
		c.clock.Set(at)
	}
	return err
}

// act does what is due. What this relay takes over, and what waits for other relays, precedes what
// it takes. An error of some rows may last for days: such a step is put off alone.
func (c *claimer) act(ctx context.Context, now time.Time, relayID int32, due agenda.Cause) error {
	if due.Has(agenda.CauseEntry | agenda.CauseTick) {
		c.agenda.At(agenda.CauseTick, now.Add(c.pollInterval))
	}
	if due.Has(agenda.CauseEntry) {
		if err := c.taker.CheckOrigin(ctx); err != nil {
			return err
		}
	}
	// The end of ctx cancels nothing from here on: what is cancelled may have committed, and would
	// wait until its lease ends. When not even outcomes are written any more, the database does not
	// answer.
	ctx = c.breakers.settling
	polling := due.Has(agenda.CausePoll | agenda.CauseTick)
	taking := polling || due.Has(agenda.CauseCutRange|agenda.CauseTakeAgain)
	scanning := due.Has(agenda.CauseEntry | agenda.CauseTick | agenda.CauseSweep | agenda.CauseRetry | agenda.CauseScan)
	if polling && now.Before(c.putOff["take"]) {
		c.pace.Full(now)
	}
	for _, step := range []struct {
		name  string
		due   bool
		again agenda.Cause // what has it done again after an error of some rows; 0: that fails the turn
		do    func() error
	}{
		{"rescue", due.Has(agenda.CauseEntry | agenda.CauseRescue), agenda.CauseRescue, func() error { return c.taker.RescueRanges(ctx, now, relayID) }},
		{"recheck keys", due.Has(agenda.CauseAwaitedKeys), agenda.CauseAwaitedKeys, func() error { return c.taker.RecheckAwaiting(ctx, relayID) }},
		{"take", taking, agenda.CauseTakeAgain, func() error {
			c.takeErr = c.taker.TakeEvents(ctx, relayID, polling)
			return c.takeErr
		}},
		{"pass a cut", taking, 0, func() error { return c.taker.PassCut(ctx, relayID) }},
		{"join", due.Has(agenda.CauseJoinKeys), 0, func() error { return c.joins.Run(ctx, c.taker.Complete) }},
		{"claim", true, 0, func() error { return c.rows.ClaimRows(ctx, relayID, scanning) }},
		{"check queue", c.pace.MustCheckQueue(now), 0, func() error { return c.checkQueue(ctx, now) }},
	} {
		if !step.due {
			continue
		}
		if until := c.putOff[step.name]; now.Before(until) {
			c.agenda.At(step.again, until)
			continue
		}
		err := step.do()
		if err != nil && (step.again == 0 || !pg.IsOfRows(err)) {
			return err
		}
		if err != nil {
			c.failed(step.name, err)
			if c.putOff == nil {
				c.putOff = map[string]time.Time{}
			}
			c.putOff[step.name] = now.Add(stepAgain)
			c.agenda.At(step.again, now.Add(stepAgain))
		}
	}
	return nil
}

// plan registers what the pace and the retries of this relay ask for.
func (c *claimer) plan(now time.Time) {
	c.pace.Plan(&c.agenda, now)
	c.mailbox.retries.Plan(&c.agenda, now)
}

// readMailbox makes due what other goroutines have posted.
func (c *claimer) readMailbox(now time.Time) {
	posted, commits := c.mailbox.read()
	c.agenda.At(posted, now)
	by := WakePoll
	switch {
	case posted.Has(agenda.CauseNotified | agenda.CauseNotifyGap | agenda.CauseSweep):
		by = WakeNotify
		c.pace.Notified(now, commits)
	case posted.Has(agenda.CauseRoom | agenda.CauseBreaker):
		by = WakeRoom
	}
	if posted.Has(agenda.CauseNotifyGap) {
		c.pace.NotifyGap(now)
	}
	if posted.Has(agenda.CauseSweep) { // a relay that stops may leave open ranges
		c.agenda.At(agenda.CauseRescue, now)
	}
	if c.woken != nil {
		c.woken(by)
	}
	for _, l := range c.lanes.Visited() {
		if posted.Has(agenda.CauseSweep) {
			l.RestartScans()
		}
		if posted.Has(agenda.CauseRescue) { // a cursor may have a large backlog before it
			l.RescanSince(c.clock.Now().Add(-rescuedWindow))
		}
	}
}

// arm declares in the database whether producers notify: they do while the load is low.
func (c *claimer) arm(ctx context.Context, now time.Time) error {
	c.pace.CannotListen = !c.mailbox.listening.Load()
	armed, changed := c.pace.Declaration(now)
	if !changed {
		return nil
	}
	if err := c.producers.Arm(ctx, c.db, armed); err != nil {
		return err
	}
	c.pace.Declared(now, armed)
	return nil
}

// checkQueue finds out, after what was notified is on its way, whether notifying costs producers
// too much.
func (c *claimer) checkQueue(ctx context.Context, now time.Time) error {
	waiting, err := session.CommitsQueue(ctx, c.db)
	if err == nil {
		c.pace.QueueChecked(now, waiting)
	}
	return err
}

// becomeIdle makes the relay idle if nothing has come for a while, and reports whether it did so
// now.
func (c *claimer) becomeIdle(now time.Time) bool {
	became := c.pace.BecomeIdle(now)
	c.mailbox.idle.Store(c.pace.Idle)
	return became
}
