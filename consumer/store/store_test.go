package store_test

import (
	"context"
	"database/sql"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/sqlconsumer"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestStoreConfigThatCannotWorkIsRefused(t *testing.T) {
	t.Parallel()
	good := store.Config{Config: consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}}}
	with := func(change func(*store.Config)) store.Config {
		c := good
		change(&c)
		return c
	}
	for want, cfg := range map[string]store.Config{
		"Config.Secrets is empty": {},
		"Isolation is set":        with(func(c *store.Config) { c.Config.Isolation = sql.LevelSerializable }),
		"Config.Lease":            with(func(c *store.Config) { c.Lease = -1 }),
		"Config.TTL is negative":  with(func(c *store.Config) { c.TTL = -1 }),
		"TTL: 5m0s is not longer": with(func(c *store.Config) { c.TTL = 5 * time.Minute }),
		"TTL: 24h0m0s is not":     with(func(c *store.Config) { c.TTL, c.Config.SenderNotAfter = 24*time.Hour, 24*time.Hour }),
		"needs a store":           good,
	} {
		var kept store.Store
		if want != "needs a store" {
			kept = newMapStore()
		}
		if _, err := store.Middleware(kept, cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: failed with %v", want, err)
		}
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
			return time.Until(kept.events["test\noutbox\nk"].until)
		}
		want := func(what string, most time.Duration) {
			if got := remaining(); got > most || got < most/2 {
				t.Errorf("%s: %s ends in %v, want %v", name, what, got, most)
			}
		}
		own := cfg
		if name == "defaults" {
			own = store.Config{}
		}
		e := newEnv(t, kept, own, func(http.ResponseWriter, *http.Request) { want("the lease", cfg.Lease) })
		receivertest.WantFirst(t, e.Post("k", "{}"), 200, "")
		want("the memory", cfg.TTL)
	}
}

func TestNoTransactionBehindAStore(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(context.Context){
		"Tx":             func(ctx context.Context) { consumer.Tx(ctx) },
		"sqlconsumer.Tx": func(ctx context.Context) { sqlconsumer.Tx(ctx) },
	} {
		e := newEnv(t, newMapStore(), store.Config{}, func(_ http.ResponseWriter, r *http.Request) {
			if event := consumer.EventFrom(r.Context()); event.IdempotencyKey != "k" || event.Source != "outbox" {
				t.Errorf("event %+v", event)
			}
			defer func() {
				if message, _ := recover().(string); !strings.Contains(message, "behind store.Middleware, which has no transaction") {
					t.Errorf("%s panicked with %q", name, message)
				}
			}()
			call(r.Context())
		})
		receivertest.WantFirst(t, e.Post("k", "{}"), 200, "")
		receivertest.WantReplayed(t, e.Post("k", "{}"), 200, "")
	}
}

// flakyStore fails as connections do: some commands work, and their answers are lost; others never
// arrive.
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

func (s *flakyStore) Complete(ctx context.Context, c store.Claim, known store.Known, ttl time.Duration) error {
	s.completes.Add(1)
	if s.unheard.Add(-1) >= 0 {
		return errors.New("connection refused")
	}
	return s.mapStore.Complete(ctx, c, known, ttl)
}

// A claim whose answer was lost would keep the event from everybody until its lease ends.
func TestALostClaimIsReleased(t *testing.T) {
	t.Parallel()
	kept := &flakyStore{mapStore: newMapStore()}
	kept.lost.Store(1)
	e := newEnv(t, kept, lasting(), created)
	receivertest.WantProblem(t, e.Post("k", "{}"), 503, "database-unavailable")
	receivertest.WantFirst(t, e.Post("k", "{}"), 201, "")
}

// A claim that is older than its lease when the store answers may be another's: a handler that does
// not ask its context would run beside that one's.
func TestAClaimThatComesTooLateIsNotWorked(t *testing.T) {
	t.Parallel()
	over := store.Config{Lease: 1} // at once
	e := newEnv(t, newMapStore(), over, func(http.ResponseWriter, *http.Request) { t.Error("the handler runs") })
	receivertest.WantProblem(t, e.Post("k", "{}"), 503, "database-unavailable")
	e.WantResult(consumer.ResultUnavailable)
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
		verify := func(_ http.Header, _ []byte, now time.Time) (consumer.Event, error) {
			event := consumer.Event{IdempotencyKey: "k", NotAfter: now.Add(c.notAfter)}
			if c.created {
				event.CreatedAt = now
			}
			return event, nil
		}
		cfg := store.Config{Config: consumer.Config{Verify: consumer.Verify{Custom: verify}}}
		e := newEnv(t, kept, cfg, func(http.ResponseWriter, *http.Request) {})
		receivertest.WantFirst(t, e.Post("k", "{}"), 200, "")
		if got := time.Until(kept.events["test\noutbox\nk"].until); got > c.want || got < c.want-time.Minute {
			t.Errorf("%s: known for %v, want %v", name, got, c.want)
		}
		late := strings.Contains(e.Logged.String(), "for longer than store.Config.TTL; what arrives later than that is refused")
		if late != (c.created && c.notAfter > 7*24*time.Hour) {
			t.Errorf("%s: logged %s", name, e.Logged.String())
		}
	}
}

// The effect has happened: a response that did not arrive is offered again, unless the event is
// another's.
func TestAStatusIsOfferedUntilItArrives(t *testing.T) {
	t.Parallel()
	kept := &flakyStore{mapStore: newMapStore()}
	kept.unheard.Store(3)
	e := newEnv(t, kept, lasting(), created)
	receivertest.WantFirst(t, e.Post("k", "{}"), 201, "")
	e.WantResult(consumer.ResultProcessed)
	receivertest.WantReplayed(t, e.Post("k", "{}"), 201, "")
	if n := kept.completes.Load(); n != 4 {
		t.Errorf("the response was offered %d times, want 4", n)
	}

	lost := &flakyStore{mapStore: newMapStore()}
	e = newEnv(t, lost, lasting(), func(http.ResponseWriter, *http.Request) {
		lost.mu.Lock()
		defer lost.mu.Unlock()
		lost.put(store.Claim{Receiver: "test", Source: "outbox", IdempotencyKey: "k"}, mapEvent{token: "another's", until: time.Now().Add(time.Hour)})
	})
	receivertest.WantProblem(t, e.Post("k", "{}"), 500, "lease-lost")
	if n := lost.completes.Load(); n != 1 {
		t.Errorf("the response was offered %d times after the lease was lost", n)
	}
}

func TestTheTextOfAKnownEvent(t *testing.T) {
	t.Parallel()
	want := store.Known{Status: 201, Hash: "e3b0c44298fc1c14", Destination: "shop"}
	text, err := want.MarshalText()
	testkit.Must(t, err)
	later := strings.Replace(string(text), "{", `{"field_of_a_later_version":[1],`, 1)
	for _, text := range []string{string(text), later} {
		var got store.Known
		testkit.Must(t, got.UnmarshalText([]byte(text)))
		testkit.Equal(t, text, got, want)
	}
	for _, text := range []string{"", "x", "{}", "null", `{"status":200}`, `{"status":199,"hash":"h"}`, `{"status":300,"hash":"h"}`, `{"status":"200","hash":"h"}`} {
		if err := new(store.Known).UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q was read", text)
		}
	}
}
