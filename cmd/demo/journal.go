package main

import (
	"context"
	"encoding/json"
	"io"
	"sync"
	"time"
)

// An entry is one line that a process of the play writes to its standard output, at once and before it does what the
// line tells, so that even a process that is killed has told everything.
type entry struct {
	Op op        `json:"op"`
	At time.Time `json:"at"`

	Addr string `json:"addr,omitempty"` // ready
	Key  string `json:"key,omitempty"`  // rolledBack, request

	Number   int    `json:"number,omitempty"`   // request, answer: which request of this life
	Attempt  int    `json:"attempt,omitempty"`  // request
	Delivery string `json:"delivery,omitempty"` // request
	Relay    string `json:"relay,omitempty"`    // request: the life that sent it
	Fault    fault  `json:"fault,omitempty"`    // request: what is going to go wrong
	Status   int    `json:"status,omitempty"`   // answer
	Replayed bool   `json:"replayed,omitempty"` // answer: to a duplicate, from storage
}

// op is what an entry tells.
type op string

const (
	opReady      op = "ready"       // the receiver listens
	opRolledBack op = "rolled_back" // finance took back an invoice that it had written
	opRequest    op = "request"     // a POST has arrived
	opAnswer     op = "answer"      // its transaction has ended, and its answer is about to be written
	opDying      op = "dying"       // the receiver is about to kill itself between commit and answer
	opBehaving   op = "behaving"    // the receiver has stopped causing faults
)

// journal writes entries. It is safe for concurrent use.
type journal struct {
	mu sync.Mutex
	w  io.Writer
}

func (j *journal) write(e entry) {
	e.At = time.Now()
	line, err := json.Marshal(e)
	if err != nil {
		panic(err) // plain fields always encode
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	_, _ = j.w.Write(append(line, '\n')) // without its reader this process is about to be killed
}

// A request is one POST as the receiver saw it.
type request struct {
	entry             // of its arrival
	receiver   string // the life that saw it
	status     int    // answered; 0: it was not
	replayed   bool
	answeredAt time.Time
}

// history is what the processes of a play told, and what was done to them. It is safe for concurrent use.
type history struct {
	mu         sync.Mutex
	requests   []*request
	open       map[requestID]*request
	rolledBack []string
	kills      map[string]time.Time // lives of relays, by name, that the play killed
	deaths     map[string]time.Time // lives of receivers that ended
	suicides   int                  // of receivers between commit and answer
	addr       string               // where the receiver listens, in every life
	behaving   bool                 // the receiver has stopped causing faults
	changed    chan struct{}        // closed at the next change; nil: nobody waits
}

type requestID struct {
	receiver string
	number   int
}

func newHistory() *history {
	return &history{open: map[requestID]*request{}, kills: map[string]time.Time{}, deaths: map[string]time.Time{}}
}

// add takes an entry that the given life wrote.
func (h *history) add(life string, e entry) {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.change()
	id := requestID{life, e.Number}
	switch e.Op {
	case opRolledBack:
		h.rolledBack = append(h.rolledBack, e.Key)
	case opRequest:
		r := &request{entry: e, receiver: life}
		h.requests = append(h.requests, r)
		h.open[id] = r
	case opAnswer:
		if r := h.open[id]; r != nil {
			r.status, r.replayed, r.answeredAt = e.Status, e.Replayed, e.At
			delete(h.open, id)
		}
	case opDying:
		h.suicides++
	case opReady:
		h.addr = e.Addr
	case opBehaving:
		h.behaving = true
	}
}

// change wakes who waits. h.mu is held.
func (h *history) change() {
	if h.changed != nil {
		close(h.changed)
		h.changed = nil
	}
}

// await waits until done, which may read every field, is true.
func (h *history) await(ctx context.Context, done func(*history) bool) error {
	for {
		h.mu.Lock()
		if done(h) {
			h.mu.Unlock()
			return nil
		}
		if h.changed == nil {
			h.changed = make(chan struct{})
		}
		changed := h.changed
		h.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// killed records that a relay is about to be killed.
func (h *history) killed(k kill) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.kills[k.life] = k.at
}

// died records that a receiver has ended.
func (h *history) died(life string, at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.change()
	h.deaths[life] = at
}

// address is where the receiver listens; empty before its first life does.
func (h *history) address() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.addr
}

// behaves reports whether the receiver has stopped causing faults.
func (h *history) behaves() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.behaving
}
