package history

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
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
	Status        int  // that it says the receiver answered; 0: none
	Held          bool // by the breaker: it counts as no attempt
	Retry         bool // the schedule says when the next request comes
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
	Timeout   time.Duration
	Schedule  time.Duration // the least time between an attempt and its retry; 0: not checked
	// Repeats is how many accepted requests beyond the first of their events the run may have; 0:
	// 300, as a crash undoes a second's settles, of 200 events and a burst, and 0.5 % of the
	// events.
	Repeats int
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
	Late         = "late after the last fault"
	NotTerminal  = "terminal state left"
	InFlight     = "in flight at the end"
	settleGrace  = 3 * time.Second      // within it a relay has written what it was answered, and a crash of the database cannot undo it any more
	timeoutGrace = time.Second          // an answer in the last second of the relay's patience may have come too late
	clockGrace   = 5 * time.Millisecond // between the clock of the history and the database's
	recoverGrace = 15 * time.Second     // for the last request after the last fault and the last commit
	keyRepeats   = 4                    // accepted requests beyond the first that one event may have
)

// checker has the history and the tables by what they are looked up with.
type checker struct {
	Tables
	faults   []Call
	commits  []Call
	posts    map[string][]Call // by key
	events   map[string]Event
	effects  map[string][]Effect
	breaches []Breach
}

func newChecker(calls []Call, t Tables) *checker {
	c := &checker{Tables: t, posts: map[string][]Call{}, events: map[string]Event{}, effects: map[string][]Effect{}}
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
	for _, key := range t.Business {
		c.committed(key)
	}
	for _, key := range slices.Sorted(maps.Keys(c.posts)) {
		c.requests(key, c.posts[key])
	}
	c.repeats()
	if after := c.recovery(); after > recoverGrace {
		c.breach(Late, "", "the last request came %s after the last fault and the last commit", after)
	}
	c.receiver(business)
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

// requests checks those of one event: each that did not deliver it has a recorded cause.
func (c *checker) requests(key string, posts []Call) {
	e, found := c.events[key]
	if !found {
		c.breach(Phantom, key, "was sent and is no committed event")
		return
	}
	claims := map[string]bool{}
	for _, p := range posts {
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

// explained reports whether a recorded cause explains that a request did not deliver its event: it
// was tampered with, it was answered too late, or a fault hit the relay that sent it before that
// had written the outcome. A request without an answer, or with another one than success, may also
// have a fault of the receivers as its cause.
func (c *checker) explained(p Call) bool {
	return p.Note != "" || p.To-p.At > c.Timeout-timeoutGrace || c.excused(p)
}

// excused reports whether a fault explains that a request did not deliver its event.
func (c *checker) excused(p Call) bool {
	return c.relayHit(p) || p.Outcome != OK && c.during(p, func(f Call) bool { return strings.HasPrefix(f.Who, "receiver") })
}

// relayHit reports whether a fault hit the relay that sent a request, from its sending until its
// outcome had to be written. A reload is none.
func (c *checker) relayHit(p Call) bool {
	return c.during(p, func(f Call) bool { return f.Note != Reload && (f.Who == "" || strings.HasPrefix(p.Who, f.Who+".")) })
}

func (c *checker) during(p Call, is func(fault Call) bool) bool {
	return slices.ContainsFunc(c.faults, func(f Call) bool { return f.At <= p.To+settleGrace && p.At <= f.To+timeoutGrace && is(f) })
}

// repeats checks how often events were accepted more than once, of one event and of all. Each such
// request may have a fault as its cause, but faults are near many requests, and undo few.
func (c *checker) repeats() {
	all, most := 0, cmp.Or(c.Repeats, 300+len(c.Events)/200)
	for _, key := range slices.Sorted(maps.Keys(c.posts)) {
		n := repeats(c.posts[key])
		if all += n; n > keyRepeats {
			c.breach(Repeated, key, "was accepted %d times more than once", n)
		}
	}
	if all > most {
		c.breach(Repeated, "", "%d accepted requests were not the first of their event, more than %d", all, most)
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

// recovery returns how long after the last fault and the last commit the last request came.
func (c *checker) recovery() time.Duration {
	var calm, last time.Duration
	for _, calls := range [][]Call{c.faults, c.commits} {
		for _, call := range calls {
			calm = max(calm, call.To)
		}
	}
	for _, posts := range c.posts {
		last = max(last, posts[len(posts)-1].At)
	}
	return last - calm
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
	last := map[string]Event{}
	events := slices.SortedFunc(slices.Values(c.Events), func(a, b Event) int { return cmp.Compare(a.ID, b.ID) })
	for _, e := range events {
		if e.OrderingKey == "" {
			continue
		}
		before, found := last[e.OrderingKey]
		last[e.OrderingKey] = e
		posts, effects := c.posts[e.Key], c.effects[e.Key]
		if !found || len(posts) == 0 || len(effects) == 0 || len(c.effects[before.Key]) == 0 {
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

// attempts checks that the log of attempts and the counts of deliveries agree with the wire. A
// relay that was hit may have failed to log a request; and what it logged last is not counted if
// the claim had become another's.
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
			if f.Status != 0 && !sent {
				c.breach(Attempts, e.Key, "was answered %d as %s, says the log, and was never sent so", f.Status, f.Delivery)
			}
			if f.Status != 0 && sent && f.Status != answer(p) {
				c.breach(Attempts, e.Key, "was answered %d as %s, says the log, and the wire answered %d", f.Status, f.Delivery, answer(p))
			}
			if f.Held {
				continue
			}
			if f.Retry && sent && !c.relayHit(p) {
				c.retried(p)
			}
			made++
			if sent && c.relayHit(p) || !sent && len(c.faults) > 0 {
				uncounted++
			}
		}
		if e.Status == "delivered" && (e.Attempts > made || e.Attempts < made-uncounted) {
			c.breach(Attempts, e.Key, "counts %d attempts, and %d were made", e.Attempts, made)
		}
		for _, p := range c.posts[e.Key] {
			if p.Delivery != e.Delivery && !logged[p.Delivery] && !c.relayHit(p) {
				c.breach(Attempts, e.Key, "was sent as %s, which the log of attempts does not have", p.Delivery)
			}
		}
	}
}

// retried checks that the request after one that is to be retried came when the schedule says. A
// relay may have given up a request without an answer before the wire did.
func (c *checker) retried(p Call) {
	posts := c.posts[p.Key]
	next := slices.IndexFunc(posts, func(q Call) bool { return q.Call == p.Call }) + 1
	ended := p.To
	if p.Outcome == Unknown {
		ended = p.At
	}
	if c.Tables.Schedule > 0 && next < len(posts) && posts[next].At < ended+c.Tables.Schedule-clockGrace {
		c.breach(Schedule, p.Key, "was to be retried after %s, and was sent again at %s", ended, posts[next].At)
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
