package consumer_test

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/consumer/store"
)

// mapStore is a Store in this process: what store.Middleware does with one can be tested without a server.
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

func (s *mapStore) Complete(ctx context.Context, c store.Claim, status int, ttl time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	held, ok := s.get(c)
	switch {
	case s.away != nil:
		return s.away
	case ok && held.token != c.Token:
		return fmt.Errorf("complete: %w", store.ErrLeaseLost)
	}
	s.put(c, mapEvent{c.Token, &store.Known{Hash: c.Hash, Status: status}, time.Now().Add(ttl)})
	return ctx.Err()
}

func (s *mapStore) Release(ctx context.Context, c store.Claim) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if held, ok := s.get(c); ok && held.token == c.Token && held.known == nil {
		delete(s.events, c.Source+"\n"+c.Key)
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
	e, ok := s.events[c.Source+"\n"+c.Key]
	return e, ok && time.Now().Before(e.until)
}

func (s *mapStore) put(c store.Claim, e mapEvent) { s.events[c.Source+"\n"+c.Key] = e }

func TestStoreConfigThatCannotWorkPanics(t *testing.T) {
	t.Parallel()
	good := store.Config{Config: consumer.Config{Receiver: "test", Secrets: []string{secretText}}}
	with := func(change func(*store.Config)) store.Config {
		c := good
		change(&c)
		return c
	}
	for want, cfg := range map[string]store.Config{
		"Config.Secrets is empty": {},
		"Isolation is set":        with(func(c *store.Config) { c.Isolation = sql.LevelSerializable }),
		"Config.Lease":            with(func(c *store.Config) { c.Lease = -1 }),
		"Config.TTL is negative":  with(func(c *store.Config) { c.TTL = -1 }),
		"TTL: 5m0s is not longer": with(func(c *store.Config) { c.TTL = 5 * time.Minute }),
		"TTL: 24h0m0s is not":     with(func(c *store.Config) { c.TTL, c.SenderNotAfter = 24*time.Hour, 24*time.Hour }),
		"needs a store":           good,
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			defer func() {
				if message, _ := recover().(string); !strings.Contains(message, want) {
					t.Errorf("panic %q, want one with %q", message, want)
				}
			}()
			var kept store.Store
			if want != "needs a store" {
				kept = newMapStore()
			}
			consumer.Must(store.Middleware(kept, cfg))
		})
	}
}

// The store counts both from when it is asked, so they pass through as they are configured.
func TestAStoreIsGivenLeaseAndTTL(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]store.Config{
		"defaults": {Lease: 30 * time.Second, TTL: 7 * 24 * time.Hour},
		"own":      {Lease: time.Hour, TTL: 48 * time.Hour},
	} {
		kept := newMapStore()
		remaining := func() time.Duration {
			kept.mu.Lock()
			defer kept.mu.Unlock()
			return time.Until(kept.events["outbox\nk"].until)
		}
		want := func(what string, most time.Duration) {
			if got := remaining(); got > most || got < most/2 {
				t.Errorf("%s: %s ends in %v, want %v", name, what, got, most)
			}
		}
		f := flavour{wrap: func(_ testing.TB, _ string, c consumer.Config) func(http.Handler) http.Handler {
			own := store.Config{Config: c}
			if name != "defaults" {
				own.Lease, own.TTL = cfg.Lease, cfg.TTL
			}
			return consumer.Must(store.Middleware(kept, own))
		}}
		e := newEnvAt(t, f, "postgres://stranger@127.0.0.1:1/none", consumer.Config{}, func(*env) http.HandlerFunc {
			return func(http.ResponseWriter, *http.Request) { want("the lease", cfg.Lease) }
		})
		wantFirst(t, e.post("k", "{}"), 200, "")
		want("the memory", cfg.TTL)
	}
}

func TestNoTransactionBehindAStore(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(context.Context){
		"Tx":             func(ctx context.Context) { consumer.Tx(ctx) },
		"sqlconsumer.Tx": func(ctx context.Context) { sqlconsumer.Tx(ctx) },
	} {
		f := flavour{wrap: func(_ testing.TB, _ string, cfg consumer.Config) func(http.Handler) http.Handler {
			return consumer.Must(store.Middleware(newMapStore(), store.Config{Config: cfg}))
		}}
		e := newEnvAt(t, f, "postgres://stranger@127.0.0.1:1/none", consumer.Config{}, func(*env) http.HandlerFunc {
			return func(_ http.ResponseWriter, r *http.Request) {
				if event := consumer.EventFrom(r.Context()); event.Key != "k" || event.Source != "outbox" {
					t.Errorf("event %+v", event)
				}
				defer func() {
					if message, _ := recover().(string); !strings.Contains(message, "behind store.Middleware, which has no transaction") {
						t.Errorf("%s panicked with %q", name, message)
					}
				}()
				call(r.Context())
			}
		})
		wantFirst(t, e.post("k", "{}"), 200, "")
		wantReplayed(t, e.post("k", "{}"), 200, "")
	}
}

// flakyStore fails as connections do: some commands work, and their answers are lost; others never arrive.
type flakyStore struct {
	*mapStore
	lost      atomic.Int64 // so many claims will be made, and reported as errors
	unheard   atomic.Int64 // so many responses will not arrive
	completes atomic.Int64
}

func (s *flakyStore) Acquire(ctx context.Context, c store.Claim, lease time.Duration) (store.Acquired, error) {
	got, err := s.mapStore.Acquire(ctx, c, lease)
	if s.lost.Add(-1) >= 0 {
		return store.Acquired{}, errors.New("connection reset")
	}
	return got, err
}

func (s *flakyStore) Complete(ctx context.Context, c store.Claim, status int, ttl time.Duration) error {
	s.completes.Add(1)
	if s.unheard.Add(-1) >= 0 {
		return errors.New("connection refused")
	}
	return s.mapStore.Complete(ctx, c, status, ttl)
}

func newFlakyEnv(t *testing.T, kept store.Store) *env {
	f := flavour{wrap: func(_ testing.TB, _ string, c consumer.Config) func(http.Handler) http.Handler {
		c.CommitTimeout = patience
		return consumer.Must(store.Middleware(kept, store.Config{Config: c, Lease: time.Hour}))
	}}
	return newEnvAt(t, f, "postgres://stranger@127.0.0.1:1/none", consumer.Config{}, func(*env) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) }
	})
}

// A claim whose answer was lost would keep the event from everybody until its lease ends.
func TestALostClaimIsReleased(t *testing.T) {
	t.Parallel()
	kept := &flakyStore{mapStore: newMapStore()}
	kept.lost.Store(1)
	e := newFlakyEnv(t, kept)
	wantProblem(t, e.post("k", "{}"), 503, "database-unavailable")
	wantFirst(t, e.post("k", "{}"), 201, "")
}

// A claim that is older than its lease when the store answers may be another's: a handler that does not ask its context
// would run beside that one's.
func TestAClaimThatComesTooLateIsNotWorked(t *testing.T) {
	t.Parallel()
	kept := newMapStore()
	f := flavour{wrap: func(_ testing.TB, _ string, c consumer.Config) func(http.Handler) http.Handler {
		return consumer.Must(store.Middleware(kept, store.Config{Config: c, Lease: 1})) // over at once
	}}
	e := newEnvAt(t, f, "postgres://stranger@127.0.0.1:1/none", consumer.Config{}, func(*env) http.HandlerFunc {
		return func(http.ResponseWriter, *http.Request) { t.Error("the handler runs") }
	})
	wantProblem(t, e.post("k", "{}"), 503, "database-unavailable")
	e.wantResult(consumer.ResultUnavailable)
}

// Without the time at which an event was created, nothing but the memory tells that it comes again.
func TestAStoreRemembersForAsLongAsTheSenderSends(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		created  bool
		notAfter time.Duration
		want     time.Duration
	}{
		"for longer than the TTL":               {false, 30 * 24 * time.Hour, 30*24*time.Hour + 5*time.Minute},
		"for less":                              {false, time.Hour, 7 * 24 * time.Hour},
		"for longer, but it says how old it is": {true, 30 * 24 * time.Hour, 7 * 24 * time.Hour},
	} {
		kept := newMapStore()
		f := flavour{wrap: func(_ testing.TB, _ string, own consumer.Config) func(http.Handler) http.Handler {
			return consumer.Must(store.Middleware(kept, store.Config{Config: consumer.Config{
				Receiver: "test",
				Observe:  own.Observe, Logger: own.Logger,
				Verify: func(_ http.Header, _ []byte, now time.Time) (consumer.Event, error) {
					event := consumer.Event{Key: "k", NotAfter: now.Add(c.notAfter)}
					if c.created {
						event.CreatedAt = now
					}
					return event, nil
				},
			}}))
		}}
		e := newEnvAt(t, f, "postgres://stranger@127.0.0.1:1/none", consumer.Config{}, func(*env) http.HandlerFunc {
			return func(http.ResponseWriter, *http.Request) {}
		})
		wantFirst(t, e.post("k", "{}"), 200, "")
		if got := time.Until(kept.events["outbox\nk"].until); got > c.want || got < c.want-time.Minute {
			t.Errorf("%s: known for %v, want %v", name, got, c.want)
		}
		late := strings.Contains(e.logged.String(), "for longer than store.Config.TTL; what arrives later than that is refused")
		if late != (c.created && c.notAfter > 7*24*time.Hour) {
			t.Errorf("%s: logged %s", name, e.logged.String())
		}
	}
}

// The effect has happened: a response that did not arrive is offered again, unless the event is another's.
func TestAStatusIsOfferedUntilItArrives(t *testing.T) {
	t.Parallel()
	kept := &flakyStore{mapStore: newMapStore()}
	kept.unheard.Store(3)
	e := newFlakyEnv(t, kept)
	wantFirst(t, e.post("k", "{}"), 201, "")
	e.wantResult(consumer.ResultProcessed)
	wantReplayed(t, e.post("k", "{}"), 201, "")
	if n := kept.completes.Load(); n != 4 {
		t.Errorf("the response was offered %d times, want 4", n)
	}

	lost := &flakyStore{mapStore: newMapStore()}
	f := flavour{wrap: func(_ testing.TB, _ string, c consumer.Config) func(http.Handler) http.Handler {
		c.CommitTimeout = patience
		return consumer.Must(store.Middleware(lost, store.Config{Config: c}))
	}}
	e = newEnvAt(t, f, "postgres://stranger@127.0.0.1:1/none", consumer.Config{}, func(*env) http.HandlerFunc {
		return func(_ http.ResponseWriter, r *http.Request) {
			lost.mu.Lock()
			defer lost.mu.Unlock()
			lost.put(store.Claim{Source: "outbox", Key: "k"}, mapEvent{token: "another's", until: time.Now().Add(time.Hour)})
		}
	})
	wantProblem(t, e.post("k", "{}"), 500, "lease-lost")
	if n := lost.completes.Load(); n != 1 {
		t.Errorf("the response was offered %d times after the lease was lost", n)
	}
}
