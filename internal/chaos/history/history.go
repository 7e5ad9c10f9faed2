// Package history records what processes did to each other while faults were made, and judges it
// afterwards.
//
//	history.go  the record: what was invoked, and what came back
//	check.go    the promises, as one pure function of the record and the final tables
//	alerts.go   the promises about alerts
//	causes.go   what may explain a request that did not deliver its event
//	measure.go  figures of a run
package history

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"
)

// A Kind is what was invoked.
type Kind string

// The kinds of calls.
const (
	Commit Kind = "commit" // a producer's transaction, Who is the producer
	Post   Kind = "post"   // a request on the wire, Who is the life of the relay that sent it
	Alert  Kind = "alert"  // likewise to people, Key is what it says
	Fault  Kind = "fault"  // Who is the role that it hit, or Relays; empty: all of them
)

// Relays are who a fault of the producers' database hits.
const Relays = "relays"

// A Harm is what a fault does to relays that write outcomes.
type Harm int

// The harms of faults. Each may do what those before it do.
const (
	None   Harm = iota // they write as ever
	Delays             // they may be able to write only when it has ended
	Undoes             // what they wrote last may be gone, and what they were to write may never be written
)

// An Outcome is what the caller knows when a call has ended.
type Outcome string

// The outcomes of calls. Unknown is also that of a call that never returned.
const (
	OK      Outcome = "ok"      // it happened
	Fail    Outcome = "fail"    // it did not happen
	Unknown Outcome = "unknown" // it may have happened
)

// Notes that the checker knows.
const (
	Later  = "later"  // of a commit: its event is not due at once
	Unfit  = "unfit"  // of a commit: its event is always refused for good
	Undone = "undone" // of a request: the receiver accepted it, and the relay was answered 500
)

// A Record is one line of a history: an invocation if Outcome is empty, and else the return of the
// call with the same number.
type Record struct {
	At       time.Duration `json:"at"` // since the history began, by the monotonic clock
	Call     int           `json:"call"`
	Kind     Kind          `json:"kind"`
	Who      string        `json:"who,omitempty"`
	Key      string        `json:"key,omitempty"`      // the idempotency key of the event
	Delivery string        `json:"delivery,omitempty"` // of a request: its delivery id, which names the claim
	Claimed  time.Duration `json:"claimed,omitempty"`  // likewise: when, by the database's clock
	Receiver string        `json:"receiver,omitempty"` // of a request: the role that it is for
	Harm     Harm          `json:"harm,omitempty"`     // of a fault
	Note     string        `json:"note,omitempty"`     // the name of a fault, or why a request could not deliver its event
	Outcome  Outcome       `json:"outcome,omitempty"`
	Status   int           `json:"status,omitempty"` // what the receiver answered; 0: nothing
}

// A History is an append-only list of records. Its methods may be called concurrently.
type History struct {
	Began time.Time

	mu      sync.Mutex // guards what follows
	records []Record
	calls   int
}

// New returns a history that begins now.
func New() *History { return &History{Began: time.Now()} }

// A Return appends the return of a call, and must be called once at most. The note, if there is
// one, takes the place of the invocation's.
type Return func(o Outcome, status int, note string)

// Invoke appends an invocation.
func (h *History) Invoke(r Record) Return {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls++
	r.Call = h.calls
	h.append(r)
	return func(o Outcome, status int, note string) {
		h.mu.Lock()
		defer h.mu.Unlock()
		r.Outcome, r.Status, r.Note = o, status, cmp.Or(note, r.Note)
		h.append(r)
	}
}

func (h *History) append(r Record) {
	r.At = time.Since(h.Began)
	h.records = append(h.records, r)
}

// WriteTo writes the records as lines of JSON.
func (h *History) WriteTo(w io.Writer) (int64, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all int64
	for _, r := range h.records {
		line, _ := json.Marshal(r) // plain fields always encode
		n, err := fmt.Fprintf(w, "%s\n", line)
		all += int64(n)
		if err != nil {
			return all, err
		}
	}
	return all, nil
}

// A Call is an invocation and its return.
type Call struct {
	Record
	To time.Duration // when it returned; never: when the history was read
}

// Calls returns the calls up to now, in the order of their invocations.
func (h *History) Calls() []Call {
	h.mu.Lock()
	defer h.mu.Unlock()
	calls := make([]Call, h.calls)
	for _, r := range h.records {
		c := &calls[r.Call-1]
		if r.Outcome == "" {
			c.Record, c.To = r, time.Since(h.Began)
			c.Outcome = Unknown
			continue
		}
		c.Outcome, c.Status, c.Note, c.To = r.Outcome, r.Status, r.Note, r.At
	}
	slices.SortStableFunc(calls, func(a, b Call) int { return cmp.Compare(a.At, b.At) })
	return calls
}
