package store_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/consumer/storetest"
)

// mapStore is a Store in this process: what store.Middleware does with one can be tested without a
// server.
type mapStore struct {
	mu     sync.Mutex // guards the fields below
	events map[string]mapEvent
	away   error // what every call fails with
}

type mapEvent struct {
	token string
	known *store.Known // nil while it is held
	until time.Time
}

func newMapStore() *mapStore { return &mapStore{events: map[string]mapEvent{}} }

func (s *mapStore) Acquire(ctx context.Context, c store.Claim, lease time.Duration) (store.Acquired, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	held, ok := s.get(c)
	switch {
	case s.away != nil:
		return store.Acquired{}, s.away
	case ok && (held.token != c.Token || held.known != nil):
		return store.Acquired{Known: held.known}, ctx.Err()
	}
	s.put(c, mapEvent{token: c.Token, until: time.Now().Add(lease)})
	return store.Acquired{Claimed: true}, ctx.Err()
}

func (s *mapStore) Complete(ctx context.Context, c store.Claim, known store.Known, ttl time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	held, ok := s.get(c)
	switch {
	case s.away != nil:
		return s.away
	case ok && held.token != c.Token:
		return fmt.Errorf("complete: %w", store.ErrLeaseLost)
	}
	s.put(c, mapEvent{c.Token, &known, time.Now().Add(ttl)})
	return ctx.Err()
}

func (s *mapStore) Release(ctx context.Context, c store.Claim) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if held, ok := s.get(c); ok && held.token == c.Token && held.known == nil {
		delete(s.events, nameOf(c))
	}
	return cmp.Or(s.away, ctx.Err())
}

// stop lets every call fail, until start.
func (s *mapStore) stop(forget bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = errors.New("connection refused")
	if forget {
		clear(s.events)
	}
}

func (s *mapStore) start() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = nil
}

func (s *mapStore) get(c store.Claim) (mapEvent, bool) {
	e, ok := s.events[nameOf(c)]
	return e, ok && time.Now().Before(e.until)
}

func (s *mapStore) put(c store.Claim, e mapEvent) { s.events[nameOf(c)] = e }

func nameOf(c store.Claim) string { return c.Receiver + "\n" + c.Source + "\n" + c.IdempotencyKey }

// The tests' own store keeps the promises of one, so that what store.Middleware does with stores is
// tested here.
func TestMapStoreConformance(t *testing.T) {
	t.Parallel()
	for name, survives := range map[string]bool{"on disk": true, "in memory": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			memory := func(testing.TB) storetest.Memory {
				kept := newMapStore()
				return storetest.Memory{
					Open:  func() store.Store { return kept },
					Stop:  func() { kept.stop(!survives) },
					Start: kept.start,
				}
			}
			storetest.Run(t, storetest.Subject{New: memory, NewServer: memory, SurvivesRestart: survives})
		})
	}
}
