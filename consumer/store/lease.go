package store

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sleep"
)

// storeMemory remembers in a [Store].
type storeMemory struct {
	memory.Settings
	store Store
	lease time.Duration
	ttl   time.Duration

	warned atomic.Bool // that the sender may send for longer than ttl
}

// Admit claims the event of a request.
func (m *storeMemory) Admit(ctx context.Context, rq *memory.Request) (memory.Found, error) {
	m.warnOfTTL(ctx, rq)
	// The lease is counted from before the store counts it, so that it never lasts longer here than
	// there.
	l := &held{storeMemory: m, event: rq.Event, hash: hex.EncodeToString(rq.Hash[:]), ctx: context.WithoutCancel(ctx), handlerUntil: time.Now().Add(m.lease / 5 * 4)}
	l.claim = Claim{Receiver: m.Receiver, Source: m.Source, IdempotencyKey: rq.Event.IdempotencyKey, Token: rand.Text()}
	acquired, err := m.store.Acquire(ctx, l.claim, m.lease)
	switch known := acquired.Known; {
	case err != nil:
		_ = l.release(time.Second) // the claim may have arrived all the same, but the client waits, and the store may not answer
		return memory.Found{}, fmt.Errorf("claim event: %w", err)
	case known == nil && !acquired.Claimed:
		return memory.Found{Admission: memory.Busy}, nil
	case known == nil && m.forgetful(&rq.Event, time.Now()):
		l.Rollback()
		return memory.Found{Admission: memory.Forgotten}, nil
	case known == nil && !time.Now().Before(l.handlerUntil):
		// The store's answer was so long on its way that the event may be another's by now, and its
		// handler running.
		_ = l.release(time.Second)
		return memory.Found{}, fmt.Errorf("claim event: the store took longer to answer than the handler may take, by a lease of %v", m.lease)
	case known == nil:
		return memory.Found{Held: l}, nil
	case m.Elsewhere(&rq.Event, known.Destination):
		return memory.Found{Admission: memory.Diverted}, nil
	case known.Hash != l.hash:
		return memory.Found{Admission: memory.Reused}, nil
	default:
		return memory.Found{Admission: memory.Duplicate, Status: known.Status}, nil
	}
}

// forgetful reports whether an event that the store does not know may have been known once. It
// would have been processed after it was created and be known for ttl from then, so one that was
// created later than that ago is certainly new. Another is not, and neither is one that its sender
// no longer retries: another party sends it.
func (m *storeMemory) forgetful(event *headers.Event, now time.Time) bool {
	return !event.CreatedAt.IsZero() && now.Sub(event.CreatedAt) > m.ttl-m.Tolerance ||
		!event.NotAfter.IsZero() && now.Sub(event.NotAfter) > m.Tolerance
}

// knownFor is for how long an event is remembered: as long as its sender says that it may come
// again, if that is longer and nothing else shows that it is late.
func (m *storeMemory) knownFor(event *headers.Event, now time.Time) time.Duration {
	if !event.CreatedAt.IsZero() || event.NotAfter.IsZero() {
		return m.ttl
	}
	return max(m.ttl, event.NotAfter.Add(m.Tolerance).Sub(now))
}

// warnOfTTL logs, once, that the sender may send an event for longer than this receiver knows it.
// Such a late event is refused, so nothing happens twice, but one of the two is not configured as
// its owner believes. An event without the time of its creation is known for as long as it needs,
// see knownFor.
func (m *storeMemory) warnOfTTL(ctx context.Context, rq *memory.Request) {
	if rq.Event.CreatedAt.IsZero() || rq.Event.NotAfter.Sub(rq.Began) <= m.ttl || m.warned.Swap(true) {
		return
	}
	m.Logger().LogAttrs(ctx, slog.LevelWarn, "consumer: the sender may send events again for longer than store.Config.TTL; what arrives later than that is refused",
		slog.String("source", m.Source), slog.Time("not_after", rq.Event.NotAfter), slog.Duration("ttl", m.ttl))
}

// held holds an event by a claim in the store.
type held struct {
	*storeMemory
	claim        Claim
	event        headers.Event
	hash         string          // of its body
	ctx          context.Context // the request's, but it outlives the request
	handlerUntil time.Time
}

// Lend ends the handler's context while the lease still lasts.
func (l *held) Lend(ctx context.Context, event headers.Event) (context.Context, context.CancelFunc) {
	return context.WithDeadline(handlerctx.With(ctx, &handlerctx.Scope{Event: event, Store: true}), l.handlerUntil)
}

// Remember may come after the lease: the store takes it unless another claim has taken the event
// over.
func (l *held) Remember(ctx context.Context, status int, _ string) error {
	err := l.complete(ctx, Known{Status: status, Hash: l.hash, Destination: l.event.Destination}, l.knownFor(&l.event, time.Now()))
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrLeaseLost):
		return fmt.Errorf("remember event: %w", err)
	}
	return fmt.Errorf("remember event: %w: %w", memory.ErrNotRemembered, err)
}

// complete tries until ctx ends. The effect has happened, and a store that restarts is back within
// seconds: to give up at the first error would be to repeat the effect for it.
func (l *held) complete(ctx context.Context, known Known, ttl time.Duration) error {
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := l.store.Complete(ctx, l.claim, known, ttl)
		if err == nil || errors.Is(err, ErrLeaseLost) || sleep.For(ctx, pause) != nil {
			return err
		}
	}
}

// Rollback releases the claim. Nothing depends on it: what is not released ends with the lease.
func (l *held) Rollback() bool {
	if err := l.release(l.CommitTimeout); err != nil {
		l.Logger().LogAttrs(l.ctx, slog.LevelWarn, "consumer: cannot release an event: it is refused as in flight until its lease ends",
			slog.String("receiver", l.claim.Receiver), slog.String("source", l.claim.Source), slog.String("key", l.claim.IdempotencyKey), slog.Duration("lease", l.lease), slog.Any("error", err))
	}
	return true
}

func (l *held) release(within time.Duration) error {
	ctx, cancel := context.WithTimeout(l.ctx, within)
	defer cancel()
	return l.store.Release(ctx, l.claim)
}
