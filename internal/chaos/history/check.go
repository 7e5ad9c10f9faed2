package history

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"
)

// An Event is a row of outbox with its delivery.
type Event struct {
	ID          int64
	Key         string
	OrderingKey string
	Status      string // of its delivery; empty: it has none
	Delivery    string // the delivery id of the last claim
	Attempts    int
	DeliveredAt time.Duration // since the history began
	DueAt       time.Duration // likewise: when it was to be sent at the earliest
}

// An Effect is what the receiver's handler wrote for an event.
type Effect struct {
	Number int64 // grows in the order in which effects were written
	Key    string
	At     time.Duration // of the commit, since the history began
}

// A Failure is a row of outbox_attempt.
type Failure struct {
	Key, Delivery string
	Who           string        // the life of the relay
	At, To        time.Duration // of the attempt, since the history began
	Status        int           // that it says the receiver answered; 0: none
	Held          bool          // by the breaker: it counts as no attempt
	Retry         bool          // the schedule says when the next request comes
}

// Tables are what both databases hold when all is over.
type Tables struct {
	Business  []string // keys of the producer's own rows, written with the events
	Events    []Event
	Effects   []Effect
	Processed []string // keys in processed_events
	Failures  []Failure
	Reopened  []string // deliveries that left a terminal state, though no operator acted
	Torn      []string // moments at which effects and processed_events differed in one snapshot
	Open      []string // what was still in flight
	Told      []Told
	Worked    []Work // by receivers that record events
	Timeout   time.Duration
	// Schedule is the least time between the first attempt and its retry, the second, and so on;
	// the last repeats. None: the database's clock was moved, and no time of it is checked.
	Schedule   []time.Duration
	RetryAfter time.Duration // what each answer of 429 and 503 asks for
	// Repeats is how many accepted requests beyond the first of their events the run may have; 0:
	// what [checker.repeats] allows.
	Repeats int
}

// A Told is a word about the destination that a relay has noted as sent to people.
type Told struct {
	Rule, State string
	At          time.Duration
}

// A Breach is one way in which a promise was broken.
type Breach struct{ Rule, Key, What string }

func (b Breach) String() string { return fmt.Sprintf("%s: %s %s", b.Rule, b.Key, b.What) }

// The rules that a breach may name.
const (
	Lost         = "lost"
	Phantom      = "phantom"
	False        = "false delivered"
	Doubled      = "doubled effect"
	Dedupe       = "dedupe not atomic"
	Early        = "2xx before commit"
	Unexplained  = "unexplained request"
	Repeated     = "accepted too often"
	Order        = "order"
	Attempts     = "attempts"
	Schedule     = "retry before its time"
	Undue        = "sent before it was due"
	Reclaimed    = "claimed after it was delivered"
	Refused      = "refused too often"
	Alerted      = "alerted twice"
	Untold       = "alert noted and not sent"
	Late         = "late after the last fault"
	Slow         = "first request late"
	NotTerminal  = "terminal state left"
	InFlight     = "in flight at the end"
	WrongEnd     = "wrong end in the inbox"
	settleGrace  = 3 * time.Second       // within it a relay has written what it was answered, and a crash of the database cannot undo it any more
	alertGrace   = 12 * time.Second      // from the arrival of an alert to its note
	timeoutGrace = time.Second           // an answer in the last second of the relay's patience may have come too late
	clockGrace   = 5 * time.Millisecond  // between the clock of the history and the database's
	recoverGrace = 15 * time.Second      // for a request after the last fault, and its commit
	overloaded   = 50 * time.Millisecond // half of the requests take longer; on a machine with time for them, they take 5 ms
	keyRepeats   = 4                     // accepted requests beyond the first that one event may have
	repeatsEach  = 2                     // that each fault may cause which undoes what relays wrote; measured: 0.1
	refusedEach  = 50                    // requests without success that each fault may cause
)

// checker has the history and the tables by what they are looked up with.
type checker struct {
	Tables
	faults   []Call
	commits  []Call
	posts    map[string][]Call // by key
	alerts   map[string][]Call // likewise
	senders  []string          // lives of relays that sent requests
	events   map[string]Event
	effects  map[string][]Effect
	took     map[time.Duration][]time.Duration // by accepted requests, sorted, by the second of their answers
	breaches []Breach
}

func newChecker(calls []Call, t Tables) *checker {
	c := &checker{Tables: t, posts: map[string][]Call{}, alerts: map[string][]Call{}, events: map[string]Event{}, effects: map[string][]Effect{}}
	for _, e := range t.Events {
		c.events[e.Key] = e
	}
	for _, e := range t.Effects {
		c.effects[e.Key] = append(c.effects[e.Key], e)
	}
	for _, call := range calls {
		switch call.Kind {
		case Fault:
			c.faults = append(c.faults, call)
		case Post:
			c.posts[call.Key] = append(c.posts[call.Key], call)
			if !slices.Contains(c.senders, call.Who) {
				c.senders = append(c.senders, call.Who)
			}
		case Alert:
			c.alerts[call.Key] = append(c.alerts[call.Key], call)
		case Commit:
			c.commits = append(c.commits, call)
		}
	}
	return c
}

// Check returns every breach of a promise in a history that ended in these tables.
func Check(calls []Call, t Tables) []Breach {
	c, business := newChecker(calls, t), set(t.Business)
	for _, call := range c.commits {
		switch {
		case call.Outcome == OK && !business[call.Key]:
			c.breach(Lost, call.Key, "was committed, and the producer's own row is gone")
		case call.Outcome == Fail && business[call.Key]:
			c.breach(Phantom, call.Key, "was rolled back, and the producer's own row is there")
		}
	}
	unfit := map[string]bool{}
	for _, call := range c.commits {
		unfit[call.Key] = call.Note == Unfit
	}
	for _, key := range t.Business {
		if unfit[key] {
			c.failed(key)
		} else {
			c.committed(key)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(c.posts)) {
		c.requests(key, c.posts[key])
	}
	c.repeats()
	c.liveness()
	if calm, last := c.recovery(); last > calm+recoverGrace+c.overload(calm, last) {
		c.breach(Late, "", "the last request came %s after the last fault and the last commit", last-calm)
	}
	c.alerted()
	c.told()
	c.receiver(business)
	c.worked()
	c.order()
	c.attempts()
	for rule, all := range map[string][]string{NotTerminal: t.Reopened, Dedupe: t.Torn, InFlight: t.Open} {
		for _, what := range all {
			c.breach(rule, "", "%s", what)
		}
	}
	return c.breaches
}

func (c *checker) breach(rule, key, what string, args ...any) {
	c.breaches = append(c.breaches, Breach{rule, key, fmt.Sprintf(what, args...)})
}

// committed checks that a committed event was delivered, by a request that was answered with
// success, and had one effect.
func (c *checker) committed(key string) {
	e, found := c.events[key]
	if !found {
		c.breach(Lost, key, "is committed and has no event")
		return
	}
	if e.Status != "delivered" {
		c.breach(Lost, key, "is %q, want delivered", e.Status)
	} else if i := slices.IndexFunc(c.posts[key], func(p Call) bool { return p.Delivery == e.Delivery && p.Outcome == OK }); i < 0 {
		c.breach(False, key, "is delivered by %s, which was not answered with success", e.Delivery)
	} else if p := c.posts[key][i]; e.DeliveredAt < p.To-clockGrace {
		c.breach(False, key, "is delivered since %s, and was answered at %s", e.DeliveredAt, p.To)
	}
	switch n := len(c.effects[key]); {
	case n == 0:
		c.breach(Lost, key, "has no effect")
	case n > 1:
		c.breach(Doubled, key, "has %d effects", n)
	}
}

// failed checks that an event that was always refused has failed, and had no effect.
func (c *checker) failed(key string) {
	if e, found := c.events[key]; !found || e.Status != "failed" || len(c.effects[key]) > 0 {
		c.breach(False, key, "was always refused, and is %q with %d effects, want failed with none", e.Status, len(c.effects[key]))
	}
}

// requests checks those of one event: each that did not deliver it has a recorded cause.
func (c *checker) requests(key string, posts []Call) {
	e, found := c.events[key]
	if !found {
		c.breach(Phantom, key, "was sent and is no committed event")
		return
	}
	if due := e.DueAt - clockGrace; len(c.Schedule) > 0 && posts[0].At < due {
		c.breach(Undue, key, "was sent at %s, and was due at %s", posts[0].At, e.DueAt)
	}
	claims, last := map[string]bool{}, c.last(e)
	for _, p := range posts {
		if p.Claimed > last.Claimed+clockGrace && last.Delivery != "" && !c.crashed(last.At, p.Claimed) {
			c.breach(Reclaimed, key, "was sent as %s, claimed at %s, after %s had delivered it at %s", p.Delivery, p.Claimed, last.Delivery, last.To)
		}
		if claims[p.Delivery] {
			c.breach(Unexplained, key, "was sent twice under the claim %s", p.Delivery)
		}
		claims[p.Delivery] = true
		if 200 <= p.Status && p.Status < 300 && !slices.ContainsFunc(c.effects[key], func(f Effect) bool { return f.At <= p.To+clockGrace }) {
			c.breach(Early, key, "was answered %d at %s, before its effect was committed", p.Status, p.To)
		}
		if p.Delivery != e.Delivery && !c.explained(p) {
			c.breach(Unexplained, key, "was sent by %s as %s at %s and answered %d; nothing explains why that was not all", p.Who, p.Delivery, p.At, p.Status)
		}
	}
}

// last returns the request that delivered an event.
func (c *checker) last(e Event) Call {
	i := slices.IndexFunc(c.posts[e.Key], func(p Call) bool { return p.Delivery == e.Delivery && p.Outcome == OK })
	if i < 0 || len(c.Schedule) == 0 { // without the database's clock nothing is known of claims
		return Call{}
	}
	return c.posts[e.Key][i]
}

// repeats checks how often events were accepted more than once, of one event and of all, and how
// often requests had no success. Each such request may have a fault as its cause, but faults are
// near many requests, and undo few. A crash undoes a second's settles, of 200 events and a burst,
// but most undo none.
func (c *checker) repeats() {
	f := c.figures()
	few := min(300, len(c.Events)/20)
	for _, key := range slices.Sorted(maps.Keys(c.posts)) {
		if n := repeats(c.posts[key]); n > keyRepeats {
			c.breach(Repeated, key, "was accepted %d times more than once", n)
		}
	}
	if most := cmp.Or(c.Repeats, few+repeatsEach*f.Crashes); f.Repeats > most {
		c.breach(Repeated, "", "%d accepted requests were not the first of their event, more than %d", f.Repeats, most)
	}
	if most := few + refusedEach*len(c.faults); f.Refused > most {
		c.breach(Refused, "", "%d requests had no success, more than %d", f.Refused, most)
	}
}

// liveness checks that each event had its first request soon after its commit, after it was due,
// and after the one before it in its ordering key was accepted. Faults that overlap the wait
// lengthen it, each moment once.
func (c *checker) liveness() {
	before := map[string]string{}
	for e, earlier := range c.keyed {
		before[e.Key] = earlier.Key
	}
	for _, commit := range c.commits {
		posts, ready := c.posts[commit.Key], max(commit.To, c.events[commit.Key].DueAt)
		if len(posts) == 0 || commit.Outcome != OK || len(c.Schedule) == 0 {
			continue
		}
		earlier := c.posts[before[commit.Key]]
		if i := slices.IndexFunc(earlier, func(p Call) bool { return p.Outcome == OK }); i >= 0 {
			ready = max(ready, earlier[i].To)
		}
		first, may := posts[0].At, ready+recoverGrace
		if first <= may {
			continue
		}
		until := ready // faults are in the order of their beginnings
		for _, f := range c.faults {
			if from := max(f.At, until); from < first && f.To > from {
				may += f.To - from
				until = f.To
			}
		}
		if may += c.overload(ready, first); first > may {
			c.breach(Slow, commit.Key, "could be sent from %s on, and was sent first at %s, later than %s", ready, first, may)
		}
	}
}

// repeats returns how many requests of one event were accepted, and their answers passed on, beyond
// the first.
func repeats(posts []Call) (n int) {
	for _, p := range posts {
		if p.Outcome == OK && p.Note == "" {
			n++
		}
	}
	return max(n-1, 0)
}

// recovery returns when the last fault and the last commit ended, and when the last request came.
func (c *checker) recovery() (calm, last time.Duration) {
	for _, calls := range [][]Call{c.faults, c.commits} {
		for _, call := range calls {
			calm = max(calm, call.To)
		}
	}
	for _, posts := range c.posts {
		last = max(last, posts[len(posts)-1].At)
	}
	return calm, last
}

// receiver checks what the receiver's database holds.
func (c *checker) receiver(business map[string]bool) {
	processed := set(c.Processed)
	for _, key := range slices.Sorted(maps.Keys(c.effects)) {
		if !business[key] {
			c.breach(Phantom, key, "has an effect and was never committed")
		}
		if !processed[key] {
			c.breach(Dedupe, key, "has an effect and is not in processed_events")
		}
	}
	for _, key := range c.Processed {
		if len(c.effects[key]) == 0 {
			c.breach(Dedupe, key, "is in processed_events and has no effect")
		}
	}
}

// order checks that the events of each ordering key were sent, and had their effects, in the order
// of their ids, which is that of their commits: the producers commit the events of a key one after
// the other.
func (c *checker) order() {
	for e, before := range c.keyed {
		posts, effects := c.posts[e.Key], c.effects[e.Key]
		if len(posts) == 0 || len(effects) == 0 || len(c.effects[before.Key]) == 0 {
			continue
		}
		if !slices.ContainsFunc(c.posts[before.Key], func(p Call) bool { return p.Outcome == OK && p.To <= posts[0].At }) {
			c.breach(Order, e.Key, "was sent at %s, before %s was accepted", posts[0].At, before.Key)
		}
		if effects[0].Number < c.effects[before.Key][0].Number {
			c.breach(Order, e.Key, "had its effect before %s", before.Key)
		}
	}
}

// keyed yields each event that has another one before it in its ordering key, with that one.
func (c *checker) keyed(yield func(e, before Event) bool) {
	last := map[string]Event{}
	for _, e := range slices.SortedFunc(slices.Values(c.Events), func(a, b Event) int { return cmp.Compare(a.ID, b.ID) }) {
		if before, found := last[e.OrderingKey]; found && e.OrderingKey != "" && !yield(e, before) {
			return
		}
		last[e.OrderingKey] = e
	}
}

// attempts checks that the log of attempts and the counts of deliveries agree with the wire. What a
// relay was to log may have been undone; and what it logged last is not counted if the claim had
// become another's.
func (c *checker) attempts() {
	failures, posts := map[string][]Failure{}, map[string]Call{}
	logged := map[string]bool{}
	for _, f := range c.Failures {
		failures[f.Key] = append(failures[f.Key], f)
		logged[f.Delivery] = true
	}
	for _, all := range c.posts {
		for _, p := range all {
			posts[p.Delivery] = p
		}
	}
	for _, e := range c.Events {
		made, uncounted := 1, 0
		for _, f := range failures[e.Key] {
			p, sent := posts[f.Delivery]
			switch {
			case sent && f.Status != 0 && f.Status != answer(p):
				c.breach(Attempts, e.Key, "was answered %d as %s, says the log, and the wire answered %d", f.Status, f.Delivery, answer(p))
			case sent && f.Status == 0 && answer(p) != 0 && f.To-f.At < c.Timeout-timeoutGrace && !c.hit(p.Who, p.At, max(p.To, f.To), Delays):
				c.breach(Attempts, e.Key, "had no answer as %s after %s, says the log, and the wire answered %d", f.Delivery, f.To-f.At, answer(p))
			case !sent && f.Status != 0:
				c.breach(Attempts, e.Key, "was answered %d as %s, says the log, and was never sent so", f.Status, f.Delivery)
			case !sent && len(c.Schedule) > 0 && !c.hit(f.Who, f.At, f.To, Delays):
				c.breach(Attempts, e.Key, "did not reach the receiver as %s at %s, says the log of %s, and nothing explains that", f.Delivery, f.At, f.Who)
			}
			if f.Held {
				continue
			}
			made++
			if !sent || c.undone(p) {
				uncounted++
			} else if f.Retry {
				c.retried(p, made-1-uncounted)
			}
		}
		if e.Status == "delivered" && (e.Attempts > made || e.Attempts < made-uncounted) {
			c.breach(Attempts, e.Key, "counts %d attempts, and %d were made", e.Attempts, made)
		}
		for _, p := range c.posts[e.Key] {
			if p.Delivery != e.Delivery && !logged[p.Delivery] && !c.undone(p) {
				c.breach(Attempts, e.Key, "was sent as %s, which the log of attempts does not have", p.Delivery)
			}
		}
	}
}

// retried checks that the request after one that is to be retried came neither before the schedule
// says, which has a delay for the number of attempts that count, nor before the receiver does. A
// relay may have given up a request without an answer before the wire did.
func (c *checker) retried(p Call, attempts int) {
	posts := c.posts[p.Key]
	next := slices.IndexFunc(posts, func(q Call) bool { return q.Call == p.Call }) + 1
	if next == len(posts) || len(c.Schedule) == 0 {
		return
	}
	due := p.To
	if p.Outcome == Unknown {
		due = p.At
	}
	wait := c.Schedule[min(attempts, len(c.Schedule))-1]
	if status := answer(p); status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
		wait = max(wait, c.RetryAfter)
	}
	if due += wait; posts[next].At < due-clockGrace {
		c.breach(Schedule, p.Key, "was sent for the %d. time until %s, and again at %s, not after %s", attempts, p.To, posts[next].At, wait)
	}
}

// answer returns the status that the wire answered a request with; 0: none.
func answer(p Call) int {
	switch {
	case p.Outcome == Unknown:
		return 0
	case p.Note == Undone:
		return http.StatusInternalServerError
	}
	return p.Status
}

func set(keys []string) map[string]bool {
	all := map[string]bool{}
	for _, key := range keys {
		all[key] = true
	}
	return all
}
