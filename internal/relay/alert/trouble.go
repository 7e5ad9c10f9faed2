package alert

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// A Trouble is what one relay sees of its database: that it is away, that it refuses for lack of
// disk, memory or connections, or that claims fail. It is safe for concurrent use.
type Trouble struct {
	Database string // host and name; empty: not known

	mu      sync.Mutex
	since   time.Time // the first failure; zero: there is none
	last    time.Time // the last failure
	ended   time.Time
	lasting bool // a statement that works does not end it, as others may be refused still
	stuck   bool // only [Trouble.Unstuck] ends it
	cause   string
	said    string           // the cause that was sent first; empty: none was
	told    map[string]State // by channel: what it knows
}

// lastsAfter is how long a lack of disk, memory or connections lasts after the last statement that
// was refused for it.
const lastsAfter = 30 * time.Second

// Failed notes a statement that failed. Errors that say nothing of the server's state are not
// counted.
func (t *Trouble) Failed(now time.Time, err error) {
	lacking, away := false, true
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok && len(refused.Code) == 5 {
		lacking = refused.Code[:2] == "53" || refused.Code[:2] == "58"
		away = refused.Code[:2] == "08" || refused.Code[:2] == "28" || refused.Code[:2] == "3D" || strings.HasPrefix(refused.Code, "57P")
	}
	if !lacking && !away || errors.Is(err, context.Canceled) || errors.Is(err, pg.ErrSchema) || errors.Is(err, pg.ErrTakenForDead) {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.note(now, now, "", err)
	t.lasting = t.lasting || lacking
}

// note records why the database fails, and when that began unless it is known. The caller holds
// t.mu.
func (t *Trouble) note(since, now time.Time, prefix string, err error) {
	if t.since.IsZero() || !t.ended.IsZero() {
		t.since, t.ended, t.lasting, t.said = since, time.Time{}, false, ""
	}
	t.last, t.cause = now, prefix+plain.Clip(err.Error())
	if hint := pg.Hint(err); hint != "" {
		t.cause += ": " + hint
	}
}

// StuckAfter is for how long claims must have failed, for whatever reason, to be a trouble with the
// database: a lock or a missing right keeps a relay from delivering as well as a database that is
// away.
const StuckAfter = 15 * time.Second

// Stuck notes that every claim has failed that began since a time, and why the last one did.
func (t *Trouble) Stuck(now, since time.Time, err error) {
	if now.Sub(since) < StuckAfter || errors.Is(err, context.Canceled) {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.note(since, now, "nothing is claimed: ", err)
	t.stuck = true
}

// Unstuck notes that claims work.
func (t *Trouble) Unstuck(now time.Time) {
	t.mu.Lock()
	was := t.stuck
	t.stuck = false
	t.mu.Unlock()
	if was {
		t.Worked(now)
	}
}

// Worked notes that the database has answered as it should.
func (t *Trouble) Worked(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.since.IsZero() || !t.ended.IsZero() || t.stuck || t.lasting && now.Before(t.last.Add(lastsAfter)) {
		return
	}
	t.ended = now
}

// observe returns the trouble as the alert of a relay; false: there was none yet.
func (t *Trouble) observe(relay string) (a Alert, found bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.since.IsZero() {
		return Alert{}, false
	}
	a = Alert{
		Rule: RuleDatabase, Subject: relay, Count: 1, Database: t.Database, OpenedAt: t.since, BeganAt: t.since,
		FirstError: cmp.Or(t.said, t.cause),
	}
	if !t.ended.IsZero() {
		ended := t.ended
		a.ResolvedAt = &ended
	} else if t.cause != a.FirstError {
		a.LastError = t.cause
	}
	return a, true
}

// Lasting returns the trouble that the relay of this name has now, as an alert; false: it has none.
func (t *Trouble) Lasting(relay string) (Alert, bool) {
	a, found := t.observe(relay)
	return a, found && a.ResolvedAt == nil
}

// toldTo returns what a channel knows.
func (t *Trouble) toldTo(channel string) State {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.told[channel]
}

// say notes the cause that is sent, which is that of the end too.
func (t *Trouble) say(cause string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.said = cause
}

// tell notes what a channel knows.
func (t *Trouble) tell(channel string, state State) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.told == nil {
		t.told = map[string]State{}
	}
	t.told[channel] = state
}

// sendTrouble sends a channel what is new about the database, of which nothing can be stored while
// it is away.
func (s *Sender) sendTrouble(ctx context.Context, now time.Time, name string) {
	if s.Trouble == nil {
		return
	}
	state := s.Trouble.toldTo(name)
	defer func() { s.Trouble.tell(name, state) }()
	a, found := s.Trouble.observe(s.Relay)
	channel, cfg := s.channel(name), s.Config()
	if !found || channel == nil {
		return
	}
	state.Rule = a.Rule
	if !state.OpenedAt.IsZero() && a.OpenedAt.After(state.OpenedAt) {
		state.Returned++
		if a.OpenedAt.Sub(state.ResolvedAt) > calm {
			state.Returned = 0
		}
	}
	state.OpenedAt, state.ResolvedAt = a.OpenedAt, time.Time{}
	if a.ResolvedAt != nil {
		state.ResolvedAt = *a.ResolvedAt
	}
	a.Returned = state.Returned
	if !cfg.Policy().Decide(now, state).Send {
		return
	}
	s.Trouble.say(a.FirstError)
	composed := s.compose(a, state, cfg)
	err := s.notify(ctx, channel, composed)
	s.notified(channel, composed, err)
	switch {
	case err != nil:
		state.Tried, state.BusyUntil = true, now.Add(Retry)
	case a.ResolvedAt != nil:
		state = State{Rule: a.Rule, OpenedAt: state.OpenedAt, ResolvedAt: state.ResolvedAt, Returned: state.Returned}
	default:
		state.SentAt, state.Tried, state.BusyUntil = now, false, time.Time{}
	}
}
