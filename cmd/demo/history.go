package main

import (
	"context"
	"sync"
	"time"
)

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
	behaved    int                  // how often the receiver has said that it causes no faults any more
	changed    chan struct{}        // closed at the next change; nil: there is no waiter
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
		h.behaved++
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

// saidToBehave returns how often the receiver has said that it behaves.
func (h *history) saidToBehave() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.behaved
}

// behaves reports whether the receiver has stopped causing faults.
func (h *history) behaves() bool { return h.saidToBehave() > 0 }
