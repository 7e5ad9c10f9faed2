package relay

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// Watching says how a relay looks after the database it is a guest of: how often it looks, and when housekeeping stands
// down so as not to make things worse.
type Watching struct {
	// Interval between two looks, which all relays of a database share. 0: 30 s. A look that takes long makes the next
	// one later: all of them together take at most a hundredth of the time.
	Interval time.Duration
	// PinnedOver is for how long something may keep the database from cleaning up before housekeeping stands down. 0: 1 min.
	PinnedOver time.Duration
	// DeadTuples is how many dead rows one of the outbox's tables may have before housekeeping waits for VACUUM. 0: 500,000.
	DeadTuples int64
}

func (w Watching) withDefaults() Watching {
	setDefault(&w.Interval, 30*time.Second)
	setDefault(&w.PinnedOver, time.Minute)
	setDefault(&w.DeadTuples, 500_000)
	return w
}

const (
	// watchDelay is when a relay looks first: one that restarts all the time must not look as often.
	watchDelay = 5 * time.Second
	// staleWatch is how old a look may be before nothing is concluded from it.
	staleWatch = 5 * time.Minute
	// rescueStorm is how many relays have to die within a window for an alert. A relay that crashes whenever it is
	// restarted does so at least every five minutes under the usual supervisors: three times in the standard window.
	rescueStorm = 3
	// trackedTransactions is how many transactions have to have passed since a slot or a standby moved on: on a quiet
	// server a healthy one stays where it is.
	trackedTransactions = 1000
	// countedTo is up to where parked deliveries and blocked keys are counted.
	countedTo = 10_000
)

// A Watch is what a relay saw when it looked around its database.
type Watch struct {
	At       time.Time // by the database's clock
	Database string
	Lanes    []LaneWatch // of destinations with pending deliveries
	// Parked deliveries, counted up to 10,001, and for how long the oldest has waited.
	Parked    int
	ParkedFor time.Duration
	// Undelivered are events without deliveries that were found so far, counted up to 1,001.
	Undelivered int
	// Holders keep the database from cleaning up, the one that has done so for the longest first; at most five sessions
	// and prepared transactions.
	Holders []Holder
	// HiddenSessions are those of other roles, of which this relay may not know what they do.
	HiddenSessions int
	// DeadTuples by table, as the statistics have them.
	DeadTuples map[string]int64
	// LockWaits are sessions that have waited for more than a second for a lock on the outbox's tables.
	LockWaits int
	// Rescues are relays that were found dead within the alert window.
	Rescues int
}

// A LaneWatch is what was seen of one destination.
type LaneWatch struct {
	Destination string
	Held        bool          // paused, or its breaker is not closed
	Lag         time.Duration // the age of the oldest due delivery that no earlier one of its ordering key blocks
	BlockedKeys int           // ordering keys that wait behind a failed delivery, counted up to 10,001
	BlockedFor  time.Duration // the longest of them
	WaitingKeys int           // ordering keys that have waited for longer than Alerts.LagOver behind a delivery that was not due, up to 1,000
	WaitingFor  time.Duration // the longest of them
}

// A Holder keeps VACUUM from removing rows that nobody needs any more.
type Holder struct {
	Kind        string // session, prepared (transaction), slot, catalog slot, standby, or unseen: a session of another role
	PID         int    // of a session
	Application string
	User        string
	State       string
	Name        string // of what is not a session
	Active      bool   // of a slot: somebody reads it
	For         time.Duration
	StateFor    time.Duration // for how long a session has been in its state
}

// lookout keeps what was seen last.
type lookout struct {
	mu     sync.Mutex
	last   Watch
	before time.Duration // how old it was when it was read
	read   time.Time     // by this process's clock
}

func (l *lookout) keep(w Watch, age time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last, l.before, l.read = w, age, time.Now()
}

// recent returns the last look; false if there is none that still tells anything.
func (l *lookout) recent() (Watch, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last, !l.read.IsZero() && l.before+time.Since(l.read) < staleWatch
}

// watch looks around the database every now and then, until ctx is done.
func (r *Relay) watch(ctx context.Context) {
	wait := min(watchDelay, r.cfg.Watching.Interval)
	for {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
		wait = r.cfg.Watching.Interval
		if _, alive := r.session.current(); !alive {
			continue // it may be the wrong database
		}
		began := time.Now()
		if err := r.searchUndelivered(ctx); err != nil && ctx.Err() == nil {
			r.databaseError("search", err)
		}
		if err := r.look(ctx); err != nil && ctx.Err() == nil {
			r.databaseError("watch", err)
		}
		// However long a pinned horizon makes it: like sweeps, it may take a hundredth of the time.
		wait = rest{r.cfg.Watching.Interval, r.restTimes}.after(time.Since(began))
	}
}

// look takes one look, or learns what another relay saw, and opens and resolves the alerts that follow from it.
func (r *Relay) look(ctx context.Context) error {
	seen, alerts, err := r.chores.watch(ctx, r.cfg.Watching.Interval*9/10, r.lenient(), r.config().Alerts)
	if err != nil {
		return err
	}
	if seen.now.Sub(seen.at) > staleWatch {
		return nil // the first look of all is under way
	}
	w := seen.watch()
	r.lookout.keep(w, seen.now.Sub(seen.at))
	if hook := r.cfg.Hooks.Watched; hook != nil {
		hook(w)
	}
	if seen.own {
		signal(r.routes) // for changes without a notification
		hold, ended := seen.judge(r.config().Alerts)
		if len(hold) > 0 || len(ended) > 0 {
			if err := r.chores.applyConditions(ctx, hold, ended, seen.at); err != nil {
				return err
			}
		}
		alerts = alerts || len(hold) > 0
	}
	if alerts {
		signal(r.alerts)
	}
	return nil
}

// lenient returns the destinations where a failed delivery does not block its ordering key.
func (r *Relay) lenient() (names []string) {
	for _, l := range r.laneList() {
		if d := l.current().Destination; d.OnFailure == policy.SkipFailed {
			names = append(names, d.Name)
		}
	}
	return names
}

// pressure returns why housekeeping should stand down now; empty: nothing speaks against it.
func (r *Relay) pressure() string {
	w, ok := r.lookout.recent()
	if !ok {
		return ""
	}
	limits := r.cfg.Watching
	for _, h := range w.Holders {
		if h.For > limits.PinnedOver && h.Kind != "catalog slot" {
			return h.String()
		}
	}
	for table, dead := range w.DeadTuples {
		if dead > limits.DeadTuples {
			return fmt.Sprintf("table %s has %s, which VACUUM has yet to remove", table, plain.Plural(dead, "dead row", "dead rows"))
		}
	}
	if w.LockWaits > 0 {
		return plain.Plural(int64(w.LockWaits), "session waits", "sessions wait") + " for locks on the outbox's tables"
	}
	return ""
}

// String says who it is, for how long, and what to do about it.
func (h Holder) String() string {
	lasted := plain.Span(h.For)
	switch h.Kind {
	case "session":
		return fmt.Sprintf("process %d (application %q, user %q, %s for %s) has had a transaction open for %s, and VACUUM can remove nothing that died since; "+
			"let its owner end it, or run: SELECT pg_terminate_backend(%d)", h.PID, plain.Clip(h.Application), plain.Clip(h.User), plain.Clip(h.State), plain.Span(h.StateFor), lasted, h.PID)
	case "prepared":
		return fmt.Sprintf("prepared transaction %q of user %q has been waiting for %s, and VACUUM can remove nothing that died since; "+
			"run COMMIT PREPARED or ROLLBACK PREPARED with its name", plain.Clip(h.Name), plain.Clip(h.User), lasted)
	case "slot":
		state := "inactive: drop it if its standby is gone"
		if h.Active {
			state = "active: look for a long query on its standby"
		}
		return fmt.Sprintf("replication slot %q has not moved for %s, and VACUUM can remove nothing that died since; it is %s", plain.Clip(h.Name), lasted, state)
	case "catalog slot":
		return fmt.Sprintf("logical replication slot %q has not moved for %s: it holds back the cleaning of system catalogs, and the write-ahead log; "+
			"see whether its reader works, or drop it", plain.Clip(h.Name), lasted)
	case "standby":
		return fmt.Sprintf("standby %q has had a query open for %s, and VACUUM can remove nothing that died since (hot_standby_feedback)", plain.Clip(strings.TrimSpace(h.Name)), lasted)
	}
	return fmt.Sprintf("a transaction has been open for %s, and VACUUM can remove nothing that died since; it belongs to another role or database, "+
		"whose sessions this relay may not see; let it: GRANT pg_read_all_stats TO its role", lasted)
}

// sample is a look as the database stores it.
type sample struct {
	own     bool // this relay looked
	at, now time.Time

	Database string        `json:"database"`
	Lanes    []laneSample  `json:"lanes"`
	Parked   *parkedSample `json:"parked"`

	Undelivered *undeliveredSample `json:"undelivered"`

	Holders []struct {
		Kind         string  `json:"kind"`
		PID          int     `json:"pid"`
		Application  string  `json:"application"`
		User         string  `json:"user"`
		State        string  `json:"state"`
		Name         string  `json:"name"`
		Seconds      float64 `json:"seconds"`
		StateSeconds float64 `json:"state_seconds"`
	} `json:"holders"`
	Tracked []struct {
		Kind         string    `json:"kind"`
		Name         string    `json:"name"`
		Transactions int64     `json:"transactions"`
		Active       bool      `json:"active"`
		Since        time.Time `json:"since"`
	} `json:"tracked"`
	Hidden    int              `json:"hidden"`
	Dead      map[string]int64 `json:"dead"`
	LockWaits int              `json:"lock_waits"`
	Rescues   struct {
		Relays int `json:"relays"`
	} `json:"rescues"`
	Alerts []alertSample `json:"alerts"`
	// Unserved are destinations with pending deliveries that no registered relay serves.
	Unserved []unservedDestination `json:"unserved"`
}

// alertSample is an alert that is open.
type alertSample struct {
	subject
	Failed bool `json:"failed"` // failed deliveries are left
	Left   bool `json:"left"`   // nothing leads to the destination any more, or waits for it; relays agree about routes
}

type laneSample struct {
	Destination    string  `json:"destination"`
	Held           bool    `json:"held"`
	Seconds        float64 `json:"seconds"`
	Event          int64   `json:"event"`
	Blocked        int     `json:"blocked"`
	BlockedSeconds float64 `json:"blocked_seconds"`
	BlockedKey     string  `json:"blocked_key"`
	BlockedEvent   int64   `json:"blocked_event"`
	Waiting        int     `json:"waiting"`
	WaitingSeconds float64 `json:"waiting_seconds"`
	WaitingKey     string  `json:"waiting_key"`
	WaitingEvent   int64   `json:"waiting_event"`
	WaitingUntil   string  `json:"waiting_until"` // in UTC, as text: a year beyond 9999 is no JSON time; empty: it is due by now
}

type undeliveredSample struct {
	Count int   `json:"count"`
	Event int64 `json:"event"`
}

type parkedSample struct {
	Count   int     `json:"count"`
	Seconds float64 `json:"seconds"`
	Event   int64   `json:"event"`
	Type    string  `json:"type"`
}

// A subject is what one alert is about.
type subject struct {
	Rule    string `json:"rule"`
	Subject string `json:"subject"`
}

// A condition holds now and should be alerted.
type condition struct {
	subject
	level  int64 // twice as much is news
	detail string
	event  int64
}

func inSeconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// upTo says how many of what is counted up to a bound.
func upTo(n int) string {
	if n > countedTo {
		return fmt.Sprintf("more than %d", countedTo)
	}
	return fmt.Sprint(n)
}

func (s *sample) watch() Watch {
	w := Watch{
		At: s.at, Database: s.Database, Holders: s.holders(), HiddenSessions: s.Hidden,
		DeadTuples: s.Dead, LockWaits: s.LockWaits, Rescues: s.Rescues.Relays,
	}
	for _, l := range s.Lanes {
		w.Lanes = append(w.Lanes, LaneWatch{
			Destination: l.Destination, Held: l.Held, Lag: inSeconds(l.Seconds),
			BlockedKeys: l.Blocked, BlockedFor: inSeconds(l.BlockedSeconds),
			WaitingKeys: l.Waiting, WaitingFor: inSeconds(l.WaitingSeconds),
		})
	}
	if s.Parked != nil {
		w.Parked, w.ParkedFor = s.Parked.Count, inSeconds(s.Parked.Seconds)
	}
	if s.Undelivered != nil {
		w.Undelivered = s.Undelivered.Count
	}
	return w
}

// holders returns what holds back the horizon, the longest first. The oldest transaction of the server explains nothing
// if there is a session to name, or none that cannot be seen.
func (s *sample) holders() (all []Holder) {
	for _, h := range s.Holders {
		all = append(all, Holder{
			Kind: h.Kind, PID: h.PID, Application: h.Application, User: h.User, State: h.State, Name: h.Name, Active: true,
			For: inSeconds(h.Seconds), StateFor: inSeconds(h.StateSeconds),
		})
	}
	for _, t := range s.Tracked {
		held := s.at.Sub(t.Since)
		explained := slices.ContainsFunc(all, func(h Holder) bool { return h.For >= held })
		switch {
		case t.Kind == "unseen" && (s.Hidden == 0 || explained || t.Transactions == 0):
		case t.Kind != "unseen" && t.Transactions < trackedTransactions:
		default:
			all = append(all, Holder{Kind: t.Kind, Name: t.Name, Active: t.Active, For: held})
		}
	}
	slices.SortStableFunc(all, func(a, b Holder) int { return cmp.Compare(b.For, a.For) })
	return all
}

// judge returns the conditions that hold, and which open alerts are over.
func (s *sample) judge(limits alert.Config) (hold []condition, ended []subject) {
	undecided := map[subject]bool{} // neither holding nor ended, since another condition hides them
	for _, u := range s.Unserved {
		undecided[subject{alert.RuleLag, u.Destination}] = true
		hold = append(hold, condition{subject{alert.RuleUnserved, u.Destination}, int64(u.Pending), upTo(u.Pending) + " pending", 0})
	}
	for _, l := range s.Lanes {
		lag := subject{alert.RuleLag, l.Destination}
		switch waited := inSeconds(l.Seconds); {
		case l.Held, undecided[lag]:
			undecided[lag] = true
		case waited > limits.LagOver:
			hold = append(hold, condition{lag, int64(waited.Minutes()), fmt.Sprintf("the oldest one that is due has waited for %s (event %d), longer than %s",
				plain.Span(waited), l.Event, plain.Span(limits.LagOver)), l.Event})
		}
		if l.Blocked > 0 {
			keys := plain.Plural(l.Blocked, "key waits", "keys wait")
			if l.Blocked > countedTo {
				keys = upTo(l.Blocked) + " keys wait"
			}
			hold = append(hold, condition{subject{alert.RuleBlockedKeys, l.Destination}, int64(l.Blocked), fmt.Sprintf(
				"%s behind a delivery that failed, the oldest for %s: key %q behind event %d", keys, plain.Span(inSeconds(l.BlockedSeconds)), plain.Clip(l.BlockedKey), l.BlockedEvent), l.BlockedEvent})
		}
		switch waiting := (subject{alert.RuleWaitingKeys, l.Destination}); {
		case l.Held:
			undecided[waiting] = true
		case l.Waiting > 0:
			hold = append(hold, condition{waiting, int64(l.Waiting), l.waiting(), l.WaitingEvent})
		}
	}
	if p := s.Parked; p != nil && p.Count > 0 {
		of := ""
		if p.Type != "" {
			of = fmt.Sprintf(" of type %q", p.Type)
		}
		hold = append(hold, condition{subject{alert.RuleParked, s.Database}, int64(p.Count), fmt.Sprintf("%s parked, the oldest for %s: event %d%s; add a route for it",
			upTo(p.Count), plain.Span(inSeconds(p.Seconds)), p.Event, of), p.Event})
	}
	if u := s.Undelivered; u != nil {
		hold = append(hold, condition{subject{alert.RuleUndelivered, s.Database}, int64(u.Count), u.String(), u.Event})
	}
	storm := subject{alert.RuleRescueStorm, s.Database}
	if dead := s.Rescues.Relays; dead >= rescueStorm {
		hold = append(hold, condition{storm, int64(dead), fmt.Sprintf("%d of them were found dead within %s",
			dead, plain.Span(limits.Window)), 0})
	} else if dead > 0 {
		undecided[storm] = true
	}
	if holders := s.holders(); len(holders) > 0 && holders[0].For > limits.HorizonOver {
		detail := holders[0].String()
		if more := len(slices.DeleteFunc(holders[1:], func(h Holder) bool { return h.For <= limits.HorizonOver })); more > 0 {
			detail += "; " + plain.Plural(more, "more holds", "more hold") + " it back, too"
		}
		hold = append(hold, condition{subject{alert.RuleHorizonPinned, s.Database}, int64(holders[0].For.Minutes()), detail, 0})
	}
	return hold, s.ended(hold, undecided)
}

// waiting says how many ordering keys wait behind a delivery that is not due, and names the first.
func (l *laneSample) waiting() string {
	until := ""
	if l.WaitingUntil != "" {
		until = ", until " + plain.Clip(l.WaitingUntil) + " UTC"
	}
	return fmt.Sprintf("%s behind a delivery that was not due, the oldest for %s: key %q behind event %d%s", plain.Plural(l.Waiting, "key waits", "keys wait"),
		plain.Span(inSeconds(l.WaitingSeconds)), plain.Clip(l.WaitingKey), l.WaitingEvent, until)
}

// ended returns the open alerts whose conditions hold no more. Nothing is decided about those in undecided.
func (s *sample) ended(hold []condition, undecided map[subject]bool) (ended []subject) {
	for _, open := range s.Alerts {
		holds := slices.ContainsFunc(hold, func(c condition) bool { return c.subject == open.subject })
		switch open.Rule {
		case alert.RuleLag, alert.RuleBlockedKeys, alert.RuleWaitingKeys, alert.RuleParked, alert.RuleUndelivered, alert.RuleRescueStorm, alert.RuleHorizonPinned, alert.RuleUnserved:
			if !holds && !undecided[open.subject] {
				ended = append(ended, open.subject)
			}
		case alert.RuleFailed:
			if !open.Failed {
				ended = append(ended, open.subject)
			}
		case alert.RuleBreakerOpen, alert.RuleRoutesChanged: // a breaker's probes end the alert, unless the destination was removed meanwhile
			if open.Left {
				ended = append(ended, open.subject)
			}
		}
	}
	return ended
}
