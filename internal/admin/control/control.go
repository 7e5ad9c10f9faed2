package control

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay"
)

const (
	// statusAge is how old a status may be that is shown.
	statusAge = 2 * time.Second
	// confirmWithin is for how long a preview can be confirmed.
	confirmWithin = 15 * time.Minute
	// maxOperations bounds how many bulk operations one process runs at once: each holds a
	// connection.
	maxOperations = 2
)

// ErrNotConfirmed says that an order needs a preview of the same selection first.
var ErrNotConfirmed = errors.New("the order is not confirmed")

// ErrBusy says that enough operations run already.
var ErrBusy = errors.New("too many operations run")

// ErrNotRunning says that this process does not work on an operation.
var ErrNotRunning = errors.New("the operation does not run here")

// Config is what a Control needs.
type Config struct {
	// Outbox answers, over a pool of at least maxOperations + 2 connections.
	Outbox *ops.Outbox
	// Environment of the relay, for the identity of the database.
	Environment string
	// ReceiverMemory is how long receivers remember what they processed: replays of older events
	// are left out. 0: for ever.
	ReceiverMemory time.Duration
	// History of what this process has not written yet; nil: relay.history is off.
	History *history.Recorder
	// Log of operations that end with an error.
	Log zerolog.Logger
}

// A Control answers for one process. It is safe for concurrent use.
type Control struct {
	Config
	key [32]byte // signs what previews found
	now func() time.Time

	sampling sync.Mutex // held while the status is read
	sampled  Sample

	past    pastCache
	follows atomic.Pointer[func() relay.State] // of this process's relay; nil: there is none yet

	mu      sync.Mutex // guards the fields below
	lanes   map[string]relay.LaneState
	base    context.Context
	running map[int64]context.CancelCauseFunc
	used    map[string]time.Time // tokens that have started something, until they expire
	working sync.WaitGroup
}

// New returns a Control. Run must be called for operations to start.
func New(cfg Config) *Control {
	c := &Control{Config: cfg, now: time.Now, running: map[int64]context.CancelCauseFunc{}, used: map[string]time.Time{}, lanes: map[string]relay.LaneState{}}
	_, _ = rand.Read(c.key[:]) // never fails
	return c
}

// Run lets operations start until ctx ends, interrupts those that run then, and waits for them.
func (c *Control) Run(ctx context.Context) {
	c.mu.Lock()
	c.base = ctx
	c.mu.Unlock()
	<-ctx.Done()
	c.mu.Lock()
	c.base = nil
	c.mu.Unlock()
	c.working.Wait()
}

// A Sample is a status and when it was read.
type Sample struct {
	ops.Status
	At time.Time `json:"at"`
}

// Status returns a status that is at most two seconds old. Readers that come together share one.
func (c *Control) Status(ctx context.Context) (Sample, error) {
	c.sampling.Lock()
	defer c.sampling.Unlock()
	if c.now().Sub(c.sampled.At) < statusAge {
		return c.sampled, nil
	}
	status, err := c.Outbox.Status(ctx, c.Environment)
	if err != nil {
		return Sample{}, err
	}
	c.sampled = Sample{Status: c.withTrouble(status), At: c.now()}
	return c.sampled, nil
}

// Follow makes the status say what the relay of this process sees of its database.
func (c *Control) Follow(state func() relay.State) { c.follows.Store(&state) }

// withTrouble adds what the database cannot say of itself, as that it refuses writes for lack of
// disk.
func (c *Control) withTrouble(status ops.Status) ops.Status {
	state := c.follows.Load()
	if state == nil {
		return status
	}
	if trouble := (*state)().Trouble; trouble != nil {
		status.Advice = slices.Insert(slices.Clone(status.Advice), 0, ops.AdviseTrouble(*trouble))
	}
	return status
}

// Forget makes the next Status read again: an operator has changed something.
func (c *Control) Forget() {
	c.sampling.Lock()
	defer c.sampling.Unlock()
	c.sampled = Sample{}
}

// A Preview is what an order would do, and the token that confirms it.
type Preview struct {
	Order ops.Order `json:"order"`
	Found ops.Bulk  `json:"found"`
	Token string    `json:"token"`
	// ExpiresAt is until when the token confirms the order.
	ExpiresAt time.Time `json:"expires_at"`
}

// Preview counts what an order would change.
func (c *Control) Preview(ctx context.Context, order ops.Order) (Preview, error) {
	if err := Check(order); err != nil {
		return Preview{}, err
	}
	order.Memory = c.ReceiverMemory
	order, found, err := c.Outbox.Preview(ctx, order)
	if err == nil && found.Matched == 0 {
		err = c.refuseUnknown(ctx, "selection.", order.Selection)
	}
	if err != nil {
		return Preview{}, err
	}
	until := c.now().Add(confirmWithin).Truncate(time.Second)
	return Preview{Order: order, Found: found, Token: c.sign(order, until), ExpiresAt: until}, nil
}

// Check returns a mistake in an order that the database would not find, as a [check.Problem].
func Check(order ops.Order) error {
	allowed := map[string][]string{"replay": {"failed", "delivered", "discarded"}, "retry": {"pending"}, "discard": {"pending", "failed"}}
	switch {
	case allowed[order.Action] == nil:
		return check.Problem{Path: "action", Text: "is not known; write replay, retry or discard"}
	case order.Selection.Limit < 0:
		return check.Problem{Path: "selection.limit", Text: "is below 0; leave it out for no limit"}
	case order.Selection.Rate != nil && *order.Selection.Rate < 0:
		return check.Problem{Path: "selection.rate", Text: "is below 0; write 0 for no limit, or leave it out for " + strconv.Itoa(ops.DefaultReplayRate)}
	case order.Selection.Rate != nil && order.Action != "replay":
		return check.Problem{Path: "selection.rate", Text: "belongs to a replay; leave it out"}
	case order.Selection.Empty():
		return check.Problem{Path: "selection", Text: "names nothing; give events, a destination, a status, a type, a reason or a time"}
	case order.Selection.Parked && order.Action != "discard":
		return check.Problem{Path: "selection.parked", Text: "can only be discarded: parked deliveries are pending, and are released when a route matches"}
	}
	for _, status := range order.Selection.Statuses {
		if choice := allowed[order.Action]; !slices.Contains(choice, status) {
			return check.Problem{Path: "selection.statuses", Text: fmt.Sprintf("%q cannot be chosen for %s; choose %s", status, order.Action, strings.Join(choice, ", "))}
		}
	}
	return nil
}

// sign binds a token to an order, what the preview counted and has seen, and a time.
func (c *Control) sign(order ops.Order, until time.Time) string {
	var head []byte
	for _, n := range []int64{until.Unix(), order.Selection.SeenAt.UnixMicro(), order.Selection.SeenEvent} {
		head = binary.BigEndian.AppendUint64(head, uint64(n))
	}
	return base64.RawURLEncoding.EncodeToString(append(head, c.mac(order, head)...))
}

// mac leaves out of the order what the head of the token has: who confirms it need not repeat that.
func (c *Control) mac(order ops.Order, head []byte) []byte {
	order.Selection.SeenAt, order.Selection.SeenEvent = time.Time{}, 0
	text, _ := json.Marshal(order) // strings, numbers and times
	mac := hmac.New(sha256.New, c.key[:])
	mac.Write(head)
	mac.Write(text)
	return mac.Sum(nil)
}

// confirmed reports whether token was given for this very order and count, and lately, and sets in
// the order what its preview has seen.
func (c *Control) confirmed(order *ops.Order, token string) bool {
	const head = 3 * 8
	raw, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(raw) != head+sha256.Size {
		return false
	}
	number := func(i int) int64 { return int64(binary.BigEndian.Uint64(raw[8*i:])) }
	order.Selection.SeenAt, order.Selection.SeenEvent = time.UnixMicro(number(1)), number(2)
	return hmac.Equal(raw[head:], c.mac(*order, raw[:head])) && c.now().Before(time.Unix(number(0), 0))
}

// Start begins an order that a preview has confirmed, and returns its number in the audit. A
// preview confirms one operation, which changes no more than the preview has seen: what matches
// since then was not confirmed. The error wraps [ErrNotConfirmed] or [ErrBusy], or is that of the
// database.
func (c *Control) Start(ctx context.Context, actor ops.Actor, order ops.Order, token string) (int64, error) {
	if err := Check(order); err != nil {
		return 0, err
	}
	if !c.confirmed(&order, token) {
		return 0, fmt.Errorf("%w: preview the same selection again, on this relay, and confirm what it counts within %s", ErrNotConfirmed, confirmWithin)
	}
	return c.launch(func(outbox *ops.Outbox) (int64, ops.Order, error) {
		if _, again := c.used[token]; again {
			return 0, order, fmt.Errorf("%w: an operation was started with this preview already; preview again", ErrNotConfirmed)
		}
		if order.Matched == 0 {
			order.Selection.Limit = -1
		}
		id, order, err := outbox.Begin(ctx, order)
		if err == nil {
			now := c.now()
			maps.DeleteFunc(c.used, func(_ string, until time.Time) bool { return !now.Before(until) })
			c.used[token] = now.Add(confirmWithin)
		}
		return id, order, err
	}, actor)
}

// Resume continues with an operation that was interrupted, or whose process was killed.
func (c *Control) Resume(ctx context.Context, actor ops.Actor, id int64) error {
	_, err := c.launch(func(outbox *ops.Outbox) (int64, ops.Order, error) {
		if _, runs := c.running[id]; runs { // it looks stalled while it finds nothing to change
			return 0, ops.Order{}, fmt.Errorf("%w: this relay works on operation %d", ops.ErrNotResumable, id)
		}
		order, err := outbox.TakeUp(ctx, id)
		return id, order, err
	}, actor)
	return err
}

// Interrupt ends an operation of this process after its present batch, and records who did. The
// error is [ErrNotRunning] if there is none.
func (c *Control) Interrupt(ctx context.Context, actor ops.Actor, id int64) error {
	c.mu.Lock()
	cancel, runs := c.running[id]
	c.mu.Unlock()
	if !runs {
		return ErrNotRunning
	}
	if err := c.Outbox.As(actor).RecordInterrupt(ctx, id); err != nil {
		return err
	}
	cancel(errInterrupted)
	return nil
}

// Runs reports whether this process works on the operation.
func (c *Control) Runs(id int64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, runs := c.running[id]
	return runs
}

var errInterrupted = errors.New("interrupted by an operator")

// launch lets begin record an order, and works on it in the background.
func (c *Control) launch(begin func(*ops.Outbox) (int64, ops.Order, error), actor ops.Actor) (int64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.base == nil:
		return 0, fmt.Errorf("%w: the relay is stopping", ErrBusy)
	case len(c.running) >= maxOperations:
		return 0, fmt.Errorf("%w: this relay works on %d; wait until one ends, or interrupt one", ErrBusy, len(c.running))
	}
	outbox := c.Outbox.As(actor)
	id, order, err := begin(outbox)
	if err != nil {
		return 0, err
	}
	order.Memory = c.ReceiverMemory
	ctx, cancel := context.WithCancelCause(c.base)
	c.running[id] = cancel
	c.working.Go(func() {
		defer cancel(nil)
		_, err := outbox.Work(ctx, id, order, nil)
		if err != nil && context.Cause(ctx) == nil {
			c.Log.Error().Err(err).Int64("operation", id).Str("action", order.Action).Msg("a bulk operation has failed; it can be resumed")
		}
		c.mu.Lock()
		delete(c.running, id)
		c.mu.Unlock()
		c.Forget()
	})
	return id, nil
}
