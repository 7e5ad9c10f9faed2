package store

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
)

// A Store remembers events where the handler's effect is not in PostgreSQL: in Redis (module
// consumer/redisstore) or DynamoDB (module consumer/dynamostore). Prefer consumer.New wherever the
// effect is in PostgreSQL. A store's memory and the effect are two things, and a crash between them
// repeats the effect. The documentation of an implementation says what else it cannot promise.
//
// A claim's Token makes every method safe to repeat, because clients of databases repeat commands
// whose answers they did not get. Methods are called concurrently, and fail within what their
// context and their client's timeouts allow. Package consumer/storetest tests whether an
// implementation keeps these promises.
type Store interface {
	// Acquire claims an event for lease, unless it is known or held by another claim. It reports
	// both. A claim that holds the event already holds it for lease from now. Of all who ask at
	// once one gets the event.
	Acquire(ctx context.Context, claim Claim, lease time.Duration) (Acquired, error)

	// Complete keeps known for ttl, which makes the event known. It fails with [ErrLeaseLost], and
	// changes nothing, when another claim holds the event or has completed it. When no other claim
	// has taken the event over, it succeeds even after the lease: the effect has happened.
	Complete(ctx context.Context, claim Claim, known Known, ttl time.Duration) error

	// Release gives up the event, so that it can be claimed at once. When it is not this claim's,
	// or known, nothing happens, and that is no error.
	Release(ctx context.Context, claim Claim) error
}

// A Claim is one request's claim to run the handler for an event.
type Claim struct {
	// Receiver and Source, those of [consumer.Config], and IdempotencyKey name the event. Each is
	// 1 to 255 printable ASCII characters.
	Receiver, Source, IdempotencyKey string

	Token string // this request's own, never used again: 26 letters and digits
}

// Acquired is what became of a claim. Its zero value says that another claim holds the event.
type Acquired struct {
	Claimed bool   // the event is this claim's
	Known   *Known // the event has been processed; nil otherwise
}

// Known is what a [Store] keeps of a processed event, and returns as it was. Later versions may add
// fields, so keep the whole: the text of [Known.MarshalText], or the struct.
type Known struct {
	Status      int    `json:"status"`                // 200 to 299, for duplicates
	Hash        string `json:"hash"`                  // of the body that was processed: distinguishes a duplicate from a reused key
	Destination string `json:"destination,omitempty"` // of the sender's destinations the one that the event was sent to
}

// MarshalText returns k as a line of JSON in UTF-8.
func (k Known) MarshalText() ([]byte, error) {
	type fields Known // has no methods, which json would call
	return json.Marshal(fields(k))
}

// UnmarshalText reads what [Known.MarshalText] returned, also that of a later version. It fails for
// any other text.
func (k *Known) UnmarshalText(text []byte) error {
	type fields Known
	if err := json.Unmarshal(text, (*fields)(k)); err != nil {
		return fmt.Errorf("read a known event: %w", err)
	}
	if k.Status < 200 || k.Status > 299 || k.Hash == "" {
		return fmt.Errorf("read a known event: %q has no status from 200 to 299, or no hash", text)
	}
	return nil
}

// Config configures [Middleware]. What [consumer.Config] requires must be set.
type Config struct {
	// Config says whom to trust, as for consumer.New. Isolation must be left alone: a store has no
	// transactions.
	Config consumer.Config

	// Lease is how long a request holds its event. Default 30 seconds, longer than a relay usually
	// waits for an answer. When the request's process dies, the event is free again after the
	// lease. Until then the sender's retries get 409.
	//
	// The handler's context ends after four fifths of the lease. A handler that obeys its context
	// has ended before another request can take the event over, unless its process stalls for the
	// last fifth. A handler that continues under context.WithoutCancel can run at the same time as
	// the next one.
	Lease time.Duration

	// TTL is how long a processed event is known. Default 7 days. It must be longer than Tolerance
	// and Lease together, and longer than SenderNotAfter, which is the only protection where a
	// sender does not say when an event was created.
	//
	// An unknown event may have been processed and forgotten if its sender created it longer ago
	// than TTL less Tolerance (for the difference of clocks), or if its time to be sent is over. It
	// is refused with 422 and the problem "forgotten". So an event that needs longer than TTL to
	// arrive for the first time is refused as well. One whose sender says only until when it may
	// come, as a consumer.VerifyFunc may, is known at least until then.
	TTL time.Duration
}

// Middleware is [consumer.Middleware] for handlers whose effect is not in PostgreSQL: it claims the
// event in store, runs the handler, has its status remembered and only then answers. It checks
// requests and answers them as consumer.Middleware does, but nothing rolls back what a handler did:
//
//   - When the handler answers anything but 2xx, or panics, the claim is released and the next
//     request runs it again from its beginning. What it did before it failed stays done.
//   - When the process dies after the effect, or the store does not take the status, the effect
//     happens again with the next request, after the lease. The status is offered to the store for
//     CommitTimeout, as often as that takes; then the sender is answered 500, and the log says what
//     happened.
//
// So the handler should be safe to repeat: pass the event's key on to whatever it calls.
// [consumer.Tx] panics behind it.
//
// It fails when store is nil or cfg cannot work.
func Middleware(store Store, cfg Config) (func(http.Handler) http.Handler, error) {
	receive, err := memory.NewReceiver(cfg.Config, func(s memory.Settings) (memory.Memory, error) {
		m := &storeMemory{Settings: s, store: store, lease: cfg.Lease, ttl: cfg.TTL}
		if err := m.complete(); err != nil {
			return nil, err
		}
		if store == nil {
			return nil, errors.New("store: Middleware needs a store")
		}
		return m, nil
	})
	if err != nil {
		return nil, err
	}
	return receive.Middleware, nil
}

// complete checks what only a store needs and fills in defaults.
func (m *storeMemory) complete() error {
	if m.Isolation != sql.LevelDefault {
		return errors.New("store: Config.Isolation is set, but a store has no transactions; leave it out")
	}
	if err := cmp.Or(
		memory.OrDefault("store: Config.Lease", &m.lease, 30*time.Second),
		memory.OrDefault("store: Config.TTL", &m.ttl, 7*24*time.Hour),
	); err != nil {
		return err
	}
	if m.ttl <= m.Tolerance+m.lease {
		return fmt.Errorf("store: Config.TTL: %v is not longer than Tolerance (%v) and Lease (%v) together", m.ttl, m.Tolerance, m.lease)
	}
	if m.ttl <= m.SenderNotAfter {
		return fmt.Errorf("store: Config.TTL: %v is not longer than the sender may send an event again (SenderNotAfter, %v), so that late "+
			"duplicates would count as new; set a longer TTL", m.ttl, m.SenderNotAfter)
	}
	return nil
}

// ErrLeaseLost is what [Store].Complete returns when another claim holds the event by now, or has
// completed it.
var ErrLeaseLost = memory.ErrLeaseLost
