package process

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// A Unit is a role of a demonstration that is always filled, see [Stage.Fill]: when its process is
// killed or told to stop, by whomever, its next life begins.
type Unit struct {
	Role   string                                // "relay-1"; its lives are relay-1.1, relay-1.2, …
	Launch func(life string, number int) Command // returns the command of a life; lives are counted from 1
	Rest   time.Duration                         // how long the role stays empty between two lives
	Ended  func(life string)                     // called when a life is over and everything it wrote has been passed on; may be nil

	mu      sync.Mutex // guards what follows
	life    string
	process *Process
}

// run fills the role until ctx is done, and then lets the process stop in order for as long as
// grace. It returns an error when a life cannot begin, or ends in failure.
func (u *Unit) run(ctx context.Context, grace time.Duration) error {
	for number := 1; ctx.Err() == nil; number++ {
		life := fmt.Sprintf("%s.%d", u.Role, number)
		p, err := Start(u.Launch(life, number))
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
		if u.Ended != nil {
			u.Ended(life)
		}
		if err := p.Failure(); err != nil {
			return fmt.Errorf("%s ended by itself: %w", life, err)
		}
		_ = sleep.For(ctx, u.Rest)
	}
	return nil
}

// Current returns the present life and its process, which may have ended. Before the first there is
// none.
func (u *Unit) Current() (life string, p *Process) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.life, u.process
}

// Kill kills the present life with SIGKILL and returns when it is gone.
func (u *Unit) Kill() {
	if _, p := u.Current(); p != nil {
		p.Kill()
	}
}
