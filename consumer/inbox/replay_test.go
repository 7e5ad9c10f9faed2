package inbox_test

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A replay of more than a batch, of many keys, while workers run: each takes effect once more, in order.
func TestInboxReplaysManyInOrder(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	p := newInbox(t, inbox.Config{Workers: 8})
	p.MustExec(`INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, attempts, payload, request_headers, ordering_key, sequence)
		SELECT 'test', 'outbox', i, 't', 'failed', 8, '{}', '{}', 'o' || i % 50, i FROM generate_series(1, 1500) i`)
	p.run()
	n, err := p.replay(inboxops.Selection{States: []string{inboxops.Failed}})
	if n != 1500 || err != nil {
		t.Fatalf("replayed %d, %v", n, err)
	}
	p.Await("SELECT count(*) = 1500 FROM inbox_events WHERE processing_state = 'succeeded' AND attempts = 1")
	p.wantInOrder()
	if n := p.Count("SELECT count(*) FROM effect"); n != 1500 {
		t.Errorf("%d effects", n)
	}
}

// An operator's command wakes the workers, which do not poll here: for what it replays, and for what waited behind an event
// that it ignores.
func TestInboxOperatorsWakeWorkers(t *testing.T) {
	t.Parallel()
	var refused sync.Map
	p := newInbox(t, inbox.Config{PollInterval: never, Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
		if _, again := refused.LoadOrStore(event.Key, true); !again && strings.HasPrefix(event.Key, "bad") {
			return consumer.Permanent(receivertest.ErrHandler)
		}
		return receivertest.EffectOf(ctx, event.Key)
	}})
	p.run()
	for i, key := range []string{"bad 1", "good 1", "bad 2", "good 2"} {
		p.record(key, ordered("o", i+1))
	}
	p.record("bad 3")
	p.awaitState("bad 1", inbox.StateFailed)
	p.awaitState("bad 3", inbox.StateFailed)
	for _, key := range []string{"bad 1", "bad 3"} {
		if n, err := p.replay(inboxops.Selection{Key: key}); n != 1 || err != nil {
			t.Fatalf("replayed %d, %v", n, err)
		}
		p.awaitState(key, inbox.StateSucceeded)
	}
	p.awaitState("good 1", inbox.StateSucceeded)
	p.awaitState("bad 2", inbox.StateFailed)
	p.wantState("good 2", inbox.StatePending, 0)
	if n, err := p.ignore(inboxops.Selection{OrderingKey: "o", States: []string{inboxops.Failed}}); n != 1 || err != nil {
		t.Fatalf("ignored %d, %v", n, err)
	}
	p.awaitState("good 2", inbox.StateSucceeded)
}

func TestInboxConfigMistakes(t *testing.T) {
	t.Parallel()
	pool := receivertest.PoolOf(t, "postgres://stranger@127.0.0.1:1/x", 9)
	handle := func(context.Context, pgx.Tx, consumer.Event) error { return nil }
	tooMuch := 2.0
	wantRefused := func(want string, pool *pgxpool.Pool, cfg inbox.Config) {
		t.Helper()
		if _, err := inbox.New(pool, cfg); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: failed with %v", want, err)
		}
	}
	for want, cfg := range map[string]inbox.Config{
		"inbox: Config.Handle is nil":                       {},
		"consumer: Config.Secrets is empty":                 {Handle: handle},
		"inbox: Config.Workers is negative: -1":             {Workers: -1},
		"inbox: Config.Workers is 9, which the pool cannot": {Workers: 9},
		`inbox: Config.TypeWorkers["t"] is 0`:               {TypeWorkers: map[string]int{"t": 0}},
		"inbox: Config.PollInterval is negative: -1s":       {PollInterval: -time.Second},
		"inbox: Config.DrainTimeout is negative: -1s":       {DrainTimeout: -time.Second},
		"inbox: Config.Schedule[1] is -1s":                  {Schedule: []time.Duration{0, -time.Second}},
		"inbox: Config.Jitter is 2: set 0 to 1":             {Jitter: &tooMuch},
		"inbox: Config.MaxAttempts is negative: -1":         {MaxAttempts: -1},
		`inbox: Config.OnFailure: "park" is not known`:      {OnFailure: "park"},
	} {
		if cfg.Handle == nil && !strings.Contains(want, "Handle is nil") {
			cfg.Handle = handle
		}
		if !strings.Contains(want, "Secrets") {
			cfg.Secrets = []string{receivertest.SecretText}
		}
		cfg.Receiver = "test"
		wantRefused(want, pool, cfg)
	}
	wantRefused("inbox: New needs a pool", nil, inbox.Config{})
	few := receivertest.PoolOf(t, "postgres://stranger@127.0.0.1:1/x", 1)
	cfg := inbox.Config{Handle: handle, Config: consumer.Config{Receiver: "test", Verify: consumer.Verify{AllowUnsigned: true}}}
	wantRefused("inbox: an inbox needs a pool of at least 2 connections", few, cfg)
}

// What the receiver may have forgotten is refused here as everywhere.
func TestInboxRefusesWhatItMayHaveForgotten(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	p.record("known", receivertest.With(webhook.CreatedAt, "2026-01-01T00:00:00Z"))
	p.MustExec("INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at) VALUES ('test', 'outbox', '2026-02-01T00:00:00Z', now())")
	receivertest.WantProblem(t, p.Do(p.NewRequest("old", "{}", receivertest.With(webhook.CreatedAt, "2026-01-31T00:00:00Z"))), 422, "forgotten")
	receivertest.WantProblem(t, p.Do(p.NewRequest("late", "{}", receivertest.With(webhook.NotAfter, "2026-01-31T00:00:00Z"))), 422, "forgotten")
	receivertest.WantReplayed(t, p.Do(p.NewRequest("known", `{"key":"known"}`, receivertest.With(webhook.CreatedAt, "2026-01-01T00:00:00Z"))), 200, `{"state":"pending"}`+"\n")
	p.record("new", receivertest.With(webhook.CreatedAt, "2026-02-02T00:00:00Z"), func(h http.Header) { h.Set(webhook.NotAfter, "2126-02-02T00:00:00Z") })
	for _, table := range []string{"processed_events", "inbox_events"} {
		if n := p.Count("SELECT count(*) FROM " + table + " WHERE not_after = '2126-02-02T00:00:00Z'"); n != 1 {
			t.Errorf("not_after is not stored in %s", table)
		}
		if n := p.Count("SELECT count(*) FROM " + table); n != 2 {
			t.Errorf("%d rows in %s, want 2", n, table)
		}
	}
}
