package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/process"
)

// A unit is a role of the play that is always filled: when its process is killed or told to stop, by whomever, its next
// life begins.
type unit struct {
	role string // "relay-1"; its lives are relay-1.1, relay-1.2, …

	// launch starts a life. Lives are counted from 1.
	launch func(life string, number int) (*process.Process, error)
	// rest is how long the role stays empty between two lives.
	rest time.Duration
	// ended is called when a life is over and everything it wrote has been taken.
	ended func(life string, at time.Time)

	mu      sync.Mutex
	life    string
	process *process.Process
}

// grace is how long a process may take to stop in order at the end of a play.
const grace = 3 * time.Second

// run fills the role until ctx is done. It returns an error when a life cannot begin, or ends in failure.
func (u *unit) run(ctx context.Context) error {
	for number := 1; ctx.Err() == nil; number++ {
		life := fmt.Sprintf("%s.%d", u.role, number)
		p, err := u.launch(life, number)
		if err != nil {
			return err
		}
		u.mu.Lock()
		u.life, u.process = life, p
		u.mu.Unlock()
		select {
		case <-p.Ended:
		case <-ctx.Done():
			p.Stop(grace)
			return nil
		}
		u.ended(life, time.Now())
		if err := p.Failure(); err != nil {
			return fmt.Errorf("%s ended by itself: %w", life, err)
		}
		select {
		case <-time.After(u.rest):
		case <-ctx.Done():
		}
	}
	return nil
}

// current returns the present life and its process, which may have ended. Before the first there is none.
func (u *unit) current() (life string, p *process.Process) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.life, u.process
}
