package main

import (
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
