package watch

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// Config says how a relay looks after the database it is a guest of: how often it looks, and when
// housekeeping stands down so as not to make things worse.
type Config struct {
	// Interval between two looks, which all relays of a database share. 0: 30 s. A look that takes
	// long makes the next one later: all of them together take a hundredth of the time, with four
	// minutes between two at most, unless they fail.
	Interval time.Duration
	// PinnedOver is for how long something may keep the database from cleaning up before
	// housekeeping stands down. 0: 1 min.
	PinnedOver time.Duration
	// DeadTuples is how many dead rows one of the outbox's tables may have before housekeeping
	// waits for VACUUM. 0: 500,000.
	DeadTuples int64
}

// WithDefaults returns a copy in which every zero value is replaced by its default.
func (w Config) WithDefaults() Config {
	w.Interval = cmp.Or(w.Interval, 30*time.Second)
	w.PinnedOver = cmp.Or(w.PinnedOver, time.Minute)
	w.DeadTuples = cmp.Or(w.DeadTuples, 500_000)
	return w
}

const (
	// watchDelay is when a relay looks first: one that restarts all the time must not look as
	// often.
	watchDelay = 5 * time.Second
	// staleWatch is how old a look may be before nothing is concluded from it.
	staleWatch = 5 * time.Minute
	// longestRest bounds the rest after a look, below staleWatch. A server that stood still during
	// a look would cost an hour of alerts.
	longestRest = staleWatch - time.Minute
	// rescueStorm is how many relays have to die within stormWithin for an alert. A relay that
	// crashes whenever it is restarted does so at least every five minutes under the usual
	// supervisors.
	rescueStorm = 3
	stormWithin = 15 * time.Minute
	// alertedInterval is how often the database is watched while an alert is open: its end is sent
	// within seconds.
	alertedInterval = 4 * time.Second
	// freshFor is how old a look may be whose numbers an alert repeats.
	freshFor = 2 * time.Second
	// trackedTransactions is how many transactions have to have passed since a slot or a standby
	// moved on: on a quiet server a healthy one stays where it is.
	trackedTransactions = 1000
	// countedTo is up to where parked deliveries and blocked keys are counted.
	countedTo = 10_000
)

// A Watch is what a relay saw when it looked around its database.
type Watch struct {
	At       time.Time // by the database's clock
	Database string
	Lanes    []LaneWatch // of destinations with pending deliveries, or with events that are not routed yet
	// Untaken events are not routed yet, counted up to 10,001, and for how long the oldest has
	// waited.
	Untaken    int
	UntakenFor time.Duration
	// Parked deliveries, counted up to 10,001, and for how long the oldest has waited.
	Parked    int
	ParkedFor time.Duration
	// Undelivered are events without deliveries that were found so far, counted up to 1,001.
	Undelivered int
	// VacuumBlockers keep the database from cleaning up, the one that has done so for the longest
	// first; at most five sessions and prepared transactions.
	VacuumBlockers []VacuumBlocker
	// HiddenSessions are those of other roles, of which this relay may not know what they do.
	HiddenSessions int
	// DeadTuples by table, as the statistics have them.
	DeadTuples map[string]int64
	// LockWaits are sessions that have waited for more than a second for a lock on the outbox's
	// tables.
	LockWaits int
	// Rescues are relays that were found dead within the last 15 minutes.
	Rescues int
}

// A LaneWatch is what was seen of one destination.
type LaneWatch struct {
	Destination string
	Held        bool          // paused, or its breaker is not closed
	Lag         time.Duration // see [Lag]
	BlockedKeys int           // ordering keys that wait behind a failed delivery, counted up to 10,001
	BlockedFor  time.Duration // the longest of them
	WaitingKeys int           // ordering keys that have waited for longer than Alerts.LagOver behind a delivery that was not due, up to 1,000
	WaitingFor  time.Duration // the longest of them
}

// A VacuumBlocker keeps VACUUM from removing rows that are not needed any more.
type VacuumBlocker struct {
	Kind        string // session, prepared (transaction), slot, catalog slot, standby, or unseen: a session of another role
	PID         int    // of a session
	Application string
	User        string
	State       string
	Name        string // of what is not a session
	Active      bool   // of a slot: it is being read
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

// A Watcher looks around the database for one relay. Its methods are safe for concurrent use, but
// for Run and Look.
type Watcher struct {
	DB      pg.DB // one statement at a time
	Config  func() Config
	Alerts  func() alert.Config // in effect
	Lenient func() []string     // destinations where a failed delivery does not block its ordering key
	Alive   func() bool         // false: it may be the wrong database
	// Rest returns how long to rest after a look, least at least.
	Rest func(least, took time.Duration) time.Duration
	// ArchiveDue returns by when an archive that ran at a time must have run again; zero: it need
	// not. Nil: it need not.
	ArchiveDue func(time.Time) time.Time
	Looked     func()                            // is called when this relay, and no other, has looked
	Due        func()                            // is called when there may be alerts to send
	Failed     func(operation string, err error) // is called for a statement that failed, and will be repeated
	Watched    func(Watch)                       // is told what was seen. nil: nothing is

	// Learnt returns where this relay sends less at once than it may. Nil: nowhere.
	Learnt func() map[string]Learnt

	lookout     lookout
	alerted     atomic.Bool // an alert is open that looks end
	interrupted atomic.Bool // the last look failed: for how long the database was away is not known
	pruned      int64       // up to which range Look has removed those that have ended
}

// Run looks around the database every now and then, until ctx is done.
func (w *Watcher) Run(ctx context.Context) {
	wait := min(watchDelay, w.Config().Interval)
	var full time.Time // when to look at all again
	slow := 0          // looks in a row that failed, or took long
	for {
		if sleep.For(ctx, wait) != nil {
			return
		}
		wait = w.Config().Interval
		if !w.Alive() {
			continue // it may be the wrong database
		}
		began := time.Now()
		var err error
		if began.Before(full) { // it ends alerts, and costs one statement
			_, err = w.look(ctx, alertedInterval*9/10)
		} else {
			full = began.Add(w.Config().Interval * 9 / 10)
			if err := w.searchUndelivered(ctx); err != nil && ctx.Err() == nil {
				w.Failed("search", err)
			}
			err = w.Look(ctx)
		}
		if err != nil && ctx.Err() == nil {
			w.Failed("watch", err)
		}
		least := w.Config().Interval
		if w.alerted.Load() {
			least = min(least, alertedInterval)
		}
		if wait = w.Rest(least, time.Since(began)); err != nil || wait > 2*w.Config().Interval {
			slow++
			wait = w.rest(wait, least, slow, err)
		} else {
			slow = 0
		}
	}
}

// rest bounds the rest after a look that failed or took long, the latest of so many in a row.
// However long a blocked vacuum makes looks, they take a hundredth of the time. But what a single
// one took may say how long the server stood still, and not what the next one costs: each further
// one doubles the rest instead. After one that did not fail it is longestRest at most.
func (w *Watcher) rest(rest, least time.Duration, slow int, err error) time.Duration {
	const doublings = 7
	longest := w.Config().Interval << min(slow, doublings)
	if err == nil {
		longest = min(longest, longestRest)
	}
	return min(rest, max(least, longest))
}

// Look takes one look, or learns what another relay saw, and opens and resolves the alerts that
// follow from it. The relay that has looked also removes ranges that have ended.
func (w *Watcher) Look(ctx context.Context) error {
	age := w.Config().Interval
	if w.alerted.Load() {
		age = min(age, alertedInterval)
	}
	own, err := w.look(ctx, age*9/10)
	if err != nil || !own {
		return err
	}
	w.Looked()
	return w.pruneRanges(ctx)
}

// Refresh makes the alerts that looks open and end true, unless they are as good as new.
func (w *Watcher) Refresh(ctx context.Context) error {
	_, err := w.look(ctx, freshFor)
	return err
}

// terms returns what this relay has configured and learnt.
func (w *Watcher) terms() terms {
	limits := w.Alerts()
	t := terms{LagOverSeconds: limits.LagOver.Seconds(), VacuumBlockedOverSeconds: limits.VacuumBlockedOver.Seconds()}
	if w.Learnt != nil {
		t.Learnt = w.Learnt()
	}
	return t
}

// look takes a look unless one is younger than age, and reports whether it did.
func (w *Watcher) look(ctx context.Context, age time.Duration) (own bool, err error) {
	seen, err := w.take(ctx, age, w.Lenient(), w.terms())
	if err != nil {
		return false, err
	}
	if seen.now.Sub(seen.at) > staleWatch {
		return false, nil // the first look of all is under way
	}
	summary := seen.watch()
	w.lookout.keep(summary, seen.now.Sub(seen.at))
	if w.Watched != nil {
		w.Watched(summary)
	}
	hold, ended := seen.conditions(w.Alerts(), w.ArchiveDue)
	w.alerted.Store(len(hold) > 0 || len(seen.Alerts) > len(ended))
	if seen.own && (len(hold) > 0 || len(ended) > 0) {
		if err := w.applyConditions(ctx, hold, ended); err != nil {
			return false, err
		}
		w.Due()
	}
	return seen.own, nil
}

// pruneRanges removes the ranges that have ended, for a hundredth of the interval between two looks
// at most. Only the relay that has looked does it, so that no two remove the same rows. It
// continues where it stopped, since before that most rows are dead; but when there is nothing, it
// begins again: what ended later is there, and after a failover numbers may be given out again.
func (w *Watcher) pruneRanges(ctx context.Context) error {
	for began := time.Now(); ; {
		next, err := intake.PruneRanges(ctx, w.DB, w.pruned)
		if err != nil {
			return err
		}
		if next == w.pruned {
			w.pruned = 0
			return nil
		}
		w.pruned = next
		if time.Since(began) > w.Config().Interval/100 {
			return nil
		}
	}
}

// Pressure returns why housekeeping should stand down now; empty: nothing speaks against it.
func (w *Watcher) Pressure() string {
	seen, ok := w.Recent()
	if !ok {
		return ""
	}
	limits := w.Config()
	for _, h := range seen.VacuumBlockers {
		if h.For > limits.PinnedOver && h.Kind != "catalog slot" {
			return h.String()
		}
	}
	for table, dead := range seen.DeadTuples {
		if dead > limits.DeadTuples {
			return fmt.Sprintf("table %s has %s, which VACUUM has yet to remove", table, plain.Plural(dead, "dead row", "dead rows"))
		}
	}
	if seen.LockWaits > 0 {
		return plain.Plural(int64(seen.LockWaits), "session waits", "sessions wait") + " for locks on the outbox's tables"
	}
	return ""
}

// Recent returns the last look; false if there is none that still says anything.
func (w *Watcher) Recent() (Watch, bool) { return w.lookout.recent() }

// String says who it is, for how long, and what to do about it.
func (h VacuumBlocker) String() string {
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
