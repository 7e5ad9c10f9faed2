// Package breaker keeps work away from what is down.
//
// Package consumer asks the [Breaker] of consumer.Config.Breaker before it touches the database,
// and reports every outcome to it. Other callers of the same dependency can share it:
//
//	pass, wait, ok := b.Enter(time.Now())
//	if !ok {
//		return fmt.Errorf("the bank is down, try again in %v", wait)
//	}
//	err := callBank()
//	b.Leave(pass, time.Now(), healthOf(err), err)
package breaker

import (
	"cmp"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/redact"
)

// A Breaker notices that a dependency is down (the database, another service) and lets no work
// begin until a probe succeeds. It is safe for concurrent use, by any number of middlewares,
// inboxes and other callers. A nil Breaker lets everything pass.
//
//	closed ──Failures in a row──▶ open ──after its wait──▶ half-open ──Successes──▶ closed
//	                               ▲                          │ one probe at a time
//	                               └──────────failed──────────┘ and the wait doubles
//
// In package consumer a middleware answers 503 at once while the breaker is open, and an inbox
// claims nothing. A relay then holds its events and spends no attempts. These count as failures
// there: the database does not let a transaction begin or breaks off its COMMIT; the handler
// answers 502, 503 or 504, or fails with an error of consumer.DependencyDown or
// consumer.RetryAfter, or at the deadline of its context. A commit is a success, and so is any
// other answer below 500, because the handler had what it needed in order to refuse. Anything else
// proves nothing, such as a 500, a panic, a duplicate, a conflict of transactions, or a client that
// hung up.
//
// An open breaker refuses duplicates too: only the database knows them, and the database may be
// what is down.
type Breaker struct {
	onChange func(State, error)
	logger   *slog.Logger

	mu        sync.Mutex // guards the fields below
	circuit   circuit
	changes   []change // that are not reported yet, oldest first
	reporting bool     // a goroutine reports, and will report what is added to changes meanwhile
}

// change is one change of state.
type change struct {
	to    State
	wait  time.Duration // until the first probe
	cause error         // of opening
}

// Config says when a [Breaker] opens and how it closes again. The zero value is right for most.
type Config struct {
	// Failures is how many failures in a row open the breaker. Default 5, as in a relay.
	Failures int

	// OpenFor is how long the breaker stays open before it lets one probe pass; it doubles with
	// each probe that fails. Default 5 seconds.
	OpenFor time.Duration

	// OpenMax bounds the doubling. Default 1 minute, or OpenFor if that is longer.
	OpenMax time.Duration

	// Successes is how many probes in a row must succeed to close the breaker, one at a time.
	// Default 1: a relay sends the events that it held slowly at first.
	Successes int

	// OnChange is called with every change of state, one after another, and with the error that
	// opened the breaker; the error is nil for the other changes. It runs on the goroutine that
	// called Enter or Leave, without a lock, and must not block: later changes wait for it, and the
	// same goroutine reports them. It may call State. A panic in it is logged and stops nothing.
	// Nil: nothing is called.
	OnChange func(to State, cause error)

	// Logger receives a warning when the breaker opens and a message when it closes. Nil is
	// slog.Default() at the time.
	Logger *slog.Logger
}

// State is what a [Breaker] does with work: a closed set, fit for a metric label.
type State string

// States of a Breaker.
const (
	Closed   State = "closed"    // all work passes
	Open     State = "open"      // none passes
	HalfOpen State = "half_open" // one probe at a time passes
)

// Health is what one piece of work proves about the dependency.
type Health int

// Values of Health. The zero value is Unknown.
const (
	Unknown Health = iota // the work proves nothing, such as its own failure
	Up                    // the dependency answered
	Down                  // the dependency is down
)

// New returns a closed Breaker. It fails when cfg cannot work.
func New(cfg Config) (*Breaker, error) {
	if cfg.Failures < 0 || cfg.OpenFor < 0 || cfg.OpenMax < 0 || cfg.Successes < 0 {
		return nil, fmt.Errorf("breaker: Config has a negative value: Failures %d, OpenFor %v, OpenMax %v, Successes %d; leave out what need not differ from the default",
			cfg.Failures, cfg.OpenFor, cfg.OpenMax, cfg.Successes)
	}
	cfg.Failures = cmp.Or(cfg.Failures, 5)
	cfg.OpenFor = cmp.Or(cfg.OpenFor, 5*time.Second)
	cfg.OpenMax = cmp.Or(cfg.OpenMax, max(time.Minute, cfg.OpenFor))
	cfg.Successes = cmp.Or(cfg.Successes, 1)
	if cfg.OpenMax < cfg.OpenFor {
		return nil, fmt.Errorf("breaker: Config.OpenMax is %v, less than OpenFor, which is %v: raise it, or leave it 0", cfg.OpenMax, cfg.OpenFor)
	}
	return &Breaker{onChange: cfg.OnChange, logger: cfg.Logger, circuit: circuit{cfg: cfg, state: Closed}}, nil
}

// State returns the present state. It stays Open when the wait is over, until the next piece of
// work enters as a probe.
func (b *Breaker) State() State {
	if b == nil {
		return Closed
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.circuit.state
}

// Enter reports whether work may begin now. If ok, the caller gives p to Leave when the work has
// ended. If not, wait is the shortest time after which it makes sense to ask again.
func (b *Breaker) Enter(now time.Time) (p Pass, wait time.Duration, ok bool) {
	if b == nil {
		return Pass{}, 0, true
	}
	b.mu.Lock()
	before := b.circuit.state
	p, wait, ok = b.circuit.enter(now)
	b.unlock(before, nil)
	return p, wait, ok
}

// Leave reports what the work that Enter let in has proven. cause is why h is Down, and nil
// otherwise; its text is logged.
func (b *Breaker) Leave(p Pass, now time.Time, h Health, cause error) {
	if b == nil {
		return
	}
	b.mu.Lock()
	before := b.circuit.state
	b.circuit.leave(p, now, h)
	b.unlock(before, cause)
}

// unlock releases mu and reports a change since before. One goroutine reports at a time, and
// without mu: OnChange may call State, and a slow OnChange must not keep other work from entering.
func (b *Breaker) unlock(before State, cause error) {
	if now := b.circuit.state; now != before {
		if now != Open {
			cause = nil
		}
		b.changes = append(b.changes, change{now, b.circuit.wait, cause})
	}
	if b.reporting || len(b.changes) == 0 {
		b.mu.Unlock()
		return
	}
	b.reporting = true
	defer func() { // also when OnChange ends its goroutine
		b.reporting = false
		b.mu.Unlock()
	}()
	for len(b.changes) > 0 {
		next := b.changes[0]
		b.changes = b.changes[1:]
		b.reportUnlocked(next)
	}
}

// reportUnlocked logs a change and calls OnChange. It releases mu, which its caller holds, for that
// time.
func (b *Breaker) reportUnlocked(c change) {
	b.mu.Unlock()
	defer b.mu.Lock()
	logger := b.logger
	if logger == nil {
		logger = slog.Default()
	}
	switch c.to {
	case Open:
		logger.Warn("breaker: open, work is refused", slog.Duration("for", c.wait), slog.Any("error", c.cause))
	case Closed:
		logger.Info("breaker: closed, work is let in again")
	}
	if b.onChange == nil {
		return
	}
	defer func() {
		if cause := recover(); cause != nil {
			logger.Error("breaker: Config.OnChange panicked", "panic", redact.Text(fmt.Sprint(cause)), "stack", string(debug.Stack()))
		}
	}()
	b.onChange(c.to, c.cause)
}

// A Pass is what [Breaker.Enter] gives to work that may begin. That of a probe is for one piece of
// work; any other can serve for several, each of which calls Leave.
type Pass struct {
	serial int
	probe  bool
	nth    int // of a probe
}

// Probe reports whether the work is a probe: the caller should let no more than this one piece
// begin.
func (p Pass) Probe() bool { return p.probe }

// circuit is the state of a Breaker and its rules. Its methods take the time and are not safe for
// concurrent use.
type circuit struct {
	cfg      Config // completed
	state    State
	serial   int           // grows when the circuit opens and closes: work from before proves nothing any more
	probes   int           // since it opened
	failures int           // in a row, while closed
	passed   int           // in a row, while half-open
	wait     time.Duration // while not closed: of this opening
	tryAt    time.Time     // open: when a probe may go; half-open: when the next probe no longer waits for the one that is out
	probing  bool          // half-open: a probe is out
}

// probeSoon is the longest wait for the outcome of a probe.
const probeSoon = time.Second

func (c *circuit) enter(now time.Time) (p Pass, wait time.Duration, ok bool) {
	switch wait := c.tryAt.Sub(now); {
	case c.state == Closed:
		return Pass{serial: c.serial}, 0, true
	case c.state == Open && wait > 0:
		return Pass{}, wait, false
	case c.state == HalfOpen && c.probing && wait > 0:
		return Pass{}, min(wait, probeSoon), false
	}
	// A probe that is out for longer than the wait does not keep others from trying: its handler
	// may hang for ever. Its outcome still counts, because where handlers take longer than the wait
	// no probe would count otherwise.
	c.probes++
	c.state, c.probing, c.tryAt = HalfOpen, true, now.Add(c.wait)
	return Pass{serial: c.serial, probe: true, nth: c.probes}, 0, true
}

func (c *circuit) leave(p Pass, now time.Time, h Health) {
	if p.serial != c.serial {
		return // the work began before the circuit opened or closed
	}
	switch c.state {
	case Closed:
		switch h {
		case Up:
			c.failures = 0
		case Down:
			if c.failures++; c.failures >= c.cfg.Failures {
				c.open(now, c.cfg.OpenFor)
			}
		}
	case HalfOpen:
		if p.nth == c.probes {
			c.probing = false
		}
		switch h {
		case Up:
			if c.passed++; c.passed >= c.cfg.Successes {
				*c = circuit{cfg: c.cfg, state: Closed, serial: c.serial + 1}
			}
		case Down:
			c.open(now, min(2*c.wait, c.cfg.OpenMax))
		}
	}
}

func (c *circuit) open(now time.Time, wait time.Duration) {
	*c = circuit{cfg: c.cfg, state: Open, serial: c.serial + 1, wait: wait, tryAt: now.Add(wait)}
}
