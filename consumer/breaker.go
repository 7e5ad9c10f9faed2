package consumer

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"
)

// A Breaker finds out that what handlers depend on is down (the database, another service), and keeps requests away from it:
// a middleware answers 503 at once, an inbox claims nothing. A relay then holds its events, at no cost in attempts.
//
//	closed ──Failures in a row──▶ open ──after its wait──▶ half-open ──Successes──▶ closed
//	                               ▲                          │ one request at a time
//	                               └──────────failed──────────┘ and the wait doubles
//
// What counts as a failure: the database does not let a transaction begin or breaks off its COMMIT; the handler answers 502,
// 503 or 504, or fails with an error of [DependencyDown] or [RetryAfter], or at the deadline of its context. A success is a
// commit, or any other answer below 500: the handler had what it needed in order to refuse. All else proves nothing, such as
// a 500, a panic, a duplicate, a conflict of transactions, or a client that went away.
//
// A duplicate is refused like any other request while the breaker is open: only the database could tell that it is one, and
// that may be what is down. It is safe for concurrent use, by any number of middlewares and inboxes.
type Breaker struct {
	onChange func(BreakerState, error)
	logger   *slog.Logger

	mu      sync.Mutex // guards the fields below
	circuit circuit
	untold  []change // in their order
	telling bool     // somebody tells, and will tell what comes to untold meanwhile
}

// change is one of state.
type change struct {
	to    BreakerState
	wait  time.Duration // until the first probe
	cause error         // of opening
}

// BreakerConfig says when a [Breaker] opens and how it closes again. The zero value is right for most.
type BreakerConfig struct {
	// Failures in a row that open it. Default 5, as many as a relay takes for its own.
	Failures int

	// OpenFor is how long it stays open before one request is let through as a probe; it doubles with each probe that
	// fails. Default 5 seconds.
	OpenFor time.Duration

	// OpenMax bounds the doubling. Default 1 minute, or OpenFor if that is longer.
	OpenMax time.Duration

	// Successes in a row that close it, one probe at a time. Default 1: the events that were held come back slowly anyway
	// when a relay sends them.
	Successes int

	// OnChange is told every change of state, one after another, and what opened it: nil for the other changes. It is
	// called on the goroutine of a request or of an inbox, and must not block: while it does, further changes wait to be told,
	// and it is this goroutine that tells them. It may ask for State. A panic in it is logged, and ends nothing. Nil tells
	// nobody.
	OnChange func(to BreakerState, cause error)

	// Logger receives a warning when it opens and a message when it closes. Nil is slog.Default() at the time.
	Logger *slog.Logger
}

// BreakerState is what a [Breaker] does with requests: a closed set, fit for a metric label.
type BreakerState string

// States of a Breaker.
const (
	BreakerClosed   BreakerState = "closed"    // all pass
	BreakerOpen     BreakerState = "open"      // none passes
	BreakerHalfOpen BreakerState = "half_open" // one at a time passes, as a probe
)

// NewBreaker returns a closed Breaker. It panics when cfg cannot work.
func NewBreaker(cfg BreakerConfig) *Breaker {
	const name = "BreakerConfig"
	defaultIn(name, "Failures", &cfg.Failures, 5)
	defaultIn(name, "OpenFor", &cfg.OpenFor, 5*time.Second)
	defaultIn(name, "OpenMax", &cfg.OpenMax, max(time.Minute, cfg.OpenFor))
	defaultIn(name, "Successes", &cfg.Successes, 1)
	if cfg.OpenMax < cfg.OpenFor {
		panic(fmt.Sprintf("consumer: BreakerConfig.OpenMax is %v, less than OpenFor, which is %v: raise it, or leave it 0", cfg.OpenMax, cfg.OpenFor))
	}
	return &Breaker{onChange: cfg.OnChange, logger: cfg.Logger, circuit: circuit{cfg: cfg, state: BreakerClosed}}
}

// State returns what the breaker last decided. It says open also when a probe is due, until one comes.
func (b *Breaker) State() BreakerState {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.circuit.state
}

// enter asks whether work may begin now. If it may not, wait says for how long at least. A nil Breaker lets everything pass.
func (b *Breaker) enter(now time.Time) (p pass, wait time.Duration, ok bool) {
	if b == nil {
		return pass{}, 0, true
	}
	b.mu.Lock()
	before := b.circuit.state
	p, wait, ok = b.circuit.enter(now)
	b.unlock(before, nil)
	return p, wait, ok
}

// leave reports what came of work that was let in, and why if that is healthDown: an error whose text may be logged.
func (b *Breaker) leave(p pass, now time.Time, h health, cause error) {
	if b == nil {
		return
	}
	b.mu.Lock()
	before := b.circuit.state
	b.circuit.leave(p, now, h)
	b.unlock(before, cause)
}

// unlock releases mu and tells of a change since before. One goroutine tells at a time, and never under mu: OnChange may ask
// for State, and one that takes long must not keep others from entering.
func (b *Breaker) unlock(before BreakerState, cause error) {
	if now := b.circuit.state; now != before {
		if now != BreakerOpen {
			cause = nil
		}
		b.untold = append(b.untold, change{now, b.circuit.wait, cause})
	}
	if b.telling || len(b.untold) == 0 {
		b.mu.Unlock()
		return
	}
	b.telling = true
	defer func() { // also when OnChange ends its goroutine
		b.telling = false
		b.mu.Unlock()
	}()
	for len(b.untold) > 0 {
		next := b.untold[0]
		b.untold = b.untold[1:]
		b.tellUnlocked(next)
	}
}

// tellUnlocked tells of a change without mu, which its caller holds.
func (b *Breaker) tellUnlocked(c change) {
	b.mu.Unlock()
	defer b.mu.Lock()
	logger := b.logger
	if logger == nil {
		logger = slog.Default()
	}
	switch c.to {
	case BreakerOpen:
		logger.Warn("consumer: breaker is open, requests are refused", slog.Duration("for", c.wait), slog.Any("error", c.cause))
	case BreakerClosed:
		logger.Info("consumer: breaker is closed, requests are taken again")
	}
	if b.onChange == nil {
		return
	}
	defer func() {
		if cause := recover(); cause != nil {
			logger.Error("consumer: BreakerConfig.OnChange panicked", "panic", redact(fmt.Sprint(cause)), "stack", string(debug.Stack()))
		}
	}()
	b.onChange(c.to, c.cause)
}

// pass lets work begin. Whoever has one gives it to leave when the work has ended. That of a probe is for one event; any
// other serves for any number of events, each of which leaves.
type pass struct {
	serial int
	probe  bool
	nth    int // of a probe
}

// circuit is the state of a Breaker and its rules. Its methods take the time and are not safe for concurrent use.
type circuit struct {
	cfg      BreakerConfig // completed
	state    BreakerState
	serial   int           // grows when it opens and closes: tells whose word still counts
	probes   int           // since it opened
	failures int           // in a row, while closed
	passed   int           // in a row, while half-open
	wait     time.Duration // while not closed: of this opening
	tryAt    time.Time     // open: when a probe may go; half-open: when the one that is out is given up
	probing  bool          // half-open: a probe is out
}

// probeSoon is how long to wait, at most, for what a probe finds out.
const probeSoon = time.Second

func (c *circuit) enter(now time.Time) (p pass, wait time.Duration, ok bool) {
	switch wait := c.tryAt.Sub(now); {
	case c.state == BreakerClosed:
		return pass{serial: c.serial}, 0, true
	case c.state == BreakerOpen && wait > 0:
		return pass{}, wait, false
	case c.state == BreakerHalfOpen && c.probing && wait > 0:
		return pass{}, min(wait, probeSoon), false
	}
	// A probe that is out for longer than the wait does not keep others from trying: its handler may hang for ever. Its word
	// counts all the same, or where handlers take longer than the wait no probe's would.
	c.probes++
	c.state, c.probing, c.tryAt = BreakerHalfOpen, true, now.Add(c.wait)
	return pass{serial: c.serial, probe: true, nth: c.probes}, 0, true
}

func (c *circuit) leave(p pass, now time.Time, h health) {
	if p.serial != c.serial {
		return // it began under another state, of which all is known
	}
	switch c.state {
	case BreakerClosed:
		switch h {
		case healthUp:
			c.failures = 0
		case healthDown:
			if c.failures++; c.failures >= c.cfg.Failures {
				c.open(now, c.cfg.OpenFor)
			}
		}
	case BreakerHalfOpen:
		if p.nth == c.probes {
			c.probing = false
		}
		switch h {
		case healthUp:
			if c.passed++; c.passed >= c.cfg.Successes {
				*c = circuit{cfg: c.cfg, state: BreakerClosed, serial: c.serial + 1}
			}
		case healthDown:
			c.open(now, min(2*c.wait, c.cfg.OpenMax))
		}
	}
}

func (c *circuit) open(now time.Time, wait time.Duration) {
	*c = circuit{cfg: c.cfg, state: BreakerOpen, serial: c.serial + 1, wait: wait, tryAt: now.Add(wait)}
}
