package consumer

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"
)

// storeMemory remembers in a [Store].
type storeMemory struct {
	*settings
	store Store
	lease time.Duration
	ttl   time.Duration

	warned atomic.Bool // that the sender may send for longer than ttl
}

func (m *storeMemory) admit(ctx context.Context, rq *request) (held, admission, int, error) {
	m.warnOfTTL(ctx, rq)
	// The lease is counted from before the store counts it, so that it never lasts longer here than there.
	l := &lease{storeMemory: m, ctx: context.WithoutCancel(ctx), handlerUntil: time.Now().Add(m.lease / 5 * 4)}
	l.claim = Claim{Receiver: m.Receiver, Source: m.Source, Key: rq.event.Key, Hash: rq.hash, Destination: rq.event.destination(), Token: rand.Text()}
	acquired, err := m.store.Acquire(ctx, l.claim, m.lease)
	switch known := acquired.Known; {
	case err != nil:
		_ = l.release(time.Second) // the claim may have arrived all the same, but the client waits, and the store may not answer
		return nil, "", 0, fmt.Errorf("claim event: %w", err)
	case known == nil && !acquired.Claimed:
		return nil, busy, 0, nil
	case known == nil && m.forgetful(&rq.event, time.Now()):
		l.rollback()
		return nil, forgotten, 0, nil
	case known == nil && !time.Now().Before(l.handlerUntil):
		// The store's answer was so long on its way that the event may be another's by now, and its handler running.
		_ = l.release(time.Second)
		return nil, "", 0, fmt.Errorf("claim event: the store took longer to answer than the handler may take, by a lease of %v", m.lease)
	case known == nil:
		return l, admitted, 0, nil
	case known.Destination != "" && l.claim.Destination != "" && known.Destination != l.claim.Destination:
		return nil, diverted, 0, nil
	case known.Hash != rq.hash:
		return nil, reused, 0, nil
	default:
		return nil, duplicate, known.Status, nil
	}
}

// forgetful reports whether an event that the store does not know may have been known once. It would have been processed
// after it was created and be known for ttl from then, so one that was created later than that ago is certainly new.
// Another is not, and neither is one that its sender no longer sends by himself: somebody else does.
func (m *storeMemory) forgetful(event *Event, now time.Time) bool {
	return !event.CreatedAt.IsZero() && now.Sub(event.CreatedAt) > m.ttl-m.Tolerance ||
		!event.NotAfter.IsZero() && now.Sub(event.NotAfter) > m.Tolerance
}

// knownFor is for how long an event is remembered: as long as its sender says that it may come again, if that is longer and
// nothing else could tell that it is late.
func (m *storeMemory) knownFor(event *Event, now time.Time) time.Duration {
	if !event.CreatedAt.IsZero() || event.NotAfter.IsZero() {
		return m.ttl
	}
	return max(m.ttl, event.NotAfter.Add(m.Tolerance).Sub(now))
}

// warnOfTTL logs, once, that the sender may send an event for longer than this receiver knows it. Such a late event is
// refused, so nothing happens twice, but one of the two is not configured as its owner believes. An event without the time of
// its creation is known for as long as it needs, see knownFor.
func (m *storeMemory) warnOfTTL(ctx context.Context, rq *request) {
	if rq.event.CreatedAt.IsZero() || rq.event.NotAfter.Sub(rq.began) <= m.ttl || m.warned.Swap(true) {
		return
	}
	m.logger().LogAttrs(ctx, slog.LevelWarn, "consumer: the sender may send events again for longer than StoreConfig.TTL; what arrives later than that is refused",
		slog.String("source", m.Source), slog.Time("not_after", rq.event.NotAfter), slog.Duration("ttl", m.ttl))
}

// lease holds an event by a claim in the store.
type lease struct {
	*storeMemory
	claim        Claim
	ctx          context.Context // the request's, but it outlives the request
	handlerUntil time.Time
}

func (l *lease) attach(sc *scope) { sc.lease = l }

// remember may come after the lease: the store takes it unless somebody else has taken the event over.
func (l *lease) remember(ctx context.Context, rq *request, a *answer) error {
	err := l.complete(ctx, a.status, l.knownFor(&rq.event, time.Now()))
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrLeaseLost):
		return fmt.Errorf("remember event: %w", err)
	}
	return fmt.Errorf("remember event: %w: %w", errNotRemembered, err)
}

// complete tries until ctx ends. The effect has happened, and a store that restarts is back within seconds: to give up
// at the first error would be to repeat the effect for it.
func (l *lease) complete(ctx context.Context, status int, ttl time.Duration) error {
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := l.store.Complete(ctx, l.claim, status, ttl)
		if err == nil || errors.Is(err, ErrLeaseLost) || ctx.Err() != nil {
			return err
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return err
		case <-timer.C:
		}
	}
}

// rollback releases the claim. Nothing depends on it: what is not released ends with the lease.
func (l *lease) rollback() {
	if err := l.release(l.CommitTimeout); err != nil {
		l.logger().LogAttrs(l.ctx, slog.LevelWarn, "consumer: cannot release an event: it is refused as in flight until its lease ends",
			slog.String("receiver", l.claim.Receiver), slog.String("source", l.claim.Source), slog.String("key", l.claim.Key), slog.Duration("lease", l.lease), slog.Any("error", err))
	}
}

func (l *lease) release(within time.Duration) error {
	ctx, cancel := context.WithTimeout(l.ctx, within)
	defer cancel()
	return l.store.Release(ctx, l.claim)
}

// leasedHandler ends the handler's context while the lease still lasts.
type leasedHandler struct{ next http.Handler }

func (h *leasedHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithDeadline(r.Context(), scopeOf(r.Context()).lease.handlerUntil)
	defer cancel()
	h.next.ServeHTTP(w, r.WithContext(ctx))
}
