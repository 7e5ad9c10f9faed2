package inbox_test

import (
	"context"
	"errors"
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
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A commit waits for the disk even where synchronous_commit is off, and as long as a stricter
// setting asks: the sender forgets what it was answered 202 for.
func TestInboxAnswerWaitsForTheDisk(t *testing.T) {
	t.Parallel()
	for set, want := range map[string]string{"off": "on", "on": "on", "local": "local", "remote_apply": "remote_apply"} {
		t.Run(set, func(t *testing.T) {
			t.Parallel()
			p := newInbox(t, inbox.Config{})
			p.SampleCommits("processed_events")
			p.MustExec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = ` + set + `', current_database()); END $$`)
			p.again(inbox.Config{}).record("k")
			p.WantCommit(want)
		})
	}
}

// The inbox's own process is woken at once: nothing here could happen by polling.
func TestInboxRecordsThenWorks(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{PollInterval: never})
	p.run()
	got := p.Post("k", "{}")
	if got.Status != http.StatusAccepted || got.Body != `{"state":"pending"}`+"\n" || got.Header.Get("Content-Type") != "application/json" {
		t.Errorf("got %d %q %v", got.Status, got.Body, got.Header)
	}
	report := p.WantResult(consumer.ResultRecorded)
	if report.Inbox || report.Status != 202 || report.Event.IdempotencyKey != "k" {
		t.Errorf("reported %+v", report)
	}
	report = p.wantWorked("k", consumer.ResultProcessed)
	if !report.Inbox || report.Status != 0 || report.Source != "outbox" || report.Duration <= 0 || report.HandlerDuration <= 0 {
		t.Errorf("reported %+v", report)
	}
	p.wantState("k", inbox.StateSucceeded, 1)
	p.WantRows("k", 1, 1)
}

// Whatever becomes of an event, its duplicate is answered 200, changes nothing, and says what has
// become of it.
func TestInboxAnswersDuplicatesInEveryState(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	p.record("k")
	body := `{"key":"k"}`
	for _, state := range []inbox.State{
		inbox.StatePending, inbox.StateProcessing, inbox.StateSucceeded, inbox.StateIgnored, inbox.StateFailed,
	} {
		p.MustExec("UPDATE inbox_events SET processing_state = $1", string(state))
		before := p.row("k")
		receivertest.WantReplayed(t, p.Post("k", body), 200, `{"state":"`+string(state)+`"}`+"\n")
		if after := p.row("k"); after != before {
			t.Errorf("the duplicate changed\n%s to\n%s", before, after)
		}
		receivertest.WantProblem(t, p.Post("k", "{}"), 422, "key-reused")
	}
}

// row is all that is kept of an event.
func (p *inboxProcess) row(key string) (text string) {
	p.T.Helper()
	if err := p.Pool.QueryRow(p.T.Context(), `SELECT p::text || ' ' || e::text
		FROM processed_events p JOIN inbox_events e USING (source, idempotency_key) WHERE idempotency_key = $1`, key).Scan(&text); err != nil {
		p.T.Fatal(err)
	}
	return text
}

// wantInOrder asserts that the effects of each ordering key are in the order of its sequence.
func (p *inboxProcess) wantInOrder() {
	p.T.Helper()
	if bad := p.Count(`SELECT count(*) FROM (
		SELECT e.sequence < lag(e.sequence) OVER (PARTITION BY e.ordering_key ORDER BY f.number) AS backwards
		FROM effect f JOIN inbox_events e ON e.idempotency_key = f.key WHERE e.ordering_key IS NOT NULL) x WHERE backwards`); bad != 0 {
		p.T.Errorf("%d effects came after a later one of their key", bad)
	}
}

func TestInboxRetriesOnItsSchedule(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{
		Handle:       func(context.Context, pgx.Tx, consumer.Event) error { return receivertest.ErrHandler },
		Schedule:     []time.Duration{0, time.Hour},
		PollInterval: 20 * time.Millisecond,
	})
	p.run()
	p.record("k", receivertest.With(webhook.Attempt, "3"))
	for range 2 {
		if report := p.wantWorked("k", consumer.ResultFailed); report.Final || report.Err != receivertest.ErrHandler {
			t.Errorf("reported %+v", report)
		}
	}
	p.wantState("k", inbox.StatePending, 2)
	if n := p.Count(`SELECT count(*) FROM inbox_events
		WHERE next_attempt_at BETWEEN now() + interval '50 minutes' AND now() + interval '1 hour' AND last_error = $1`, receivertest.ErrHandler.Error()); n != 1 {
		t.Errorf("the next attempt is not in an hour: %s", p.row("k"))
	}
}

// A moment that is before the year 10000 in UTC is recorded so, wherever its sender lives.
func TestInboxRecordsMomentsInUTC(t *testing.T) {
	t.Parallel()
	last := time.UnixMilli(253402300799999).In(time.FixedZone("JST", 9*60*60))
	given := make(chan consumer.Event, 1)
	p := newInbox(t, inbox.Config{
		Config: consumer.Config{Verify: consumer.Verify{Custom: func(http.Header, []byte, time.Time) (consumer.Event, error) {
			return consumer.Event{IdempotencyKey: "k", Type: "t", NotAfter: last}, nil
		}}},
		Handle: func(_ context.Context, _ pgx.Tx, event consumer.Event) error { given <- event; return nil },
	})
	p.run()
	p.record("k")
	p.wantWorked("k", consumer.ResultProcessed)
	if event := <-given; !event.NotAfter.Equal(last) {
		t.Errorf("the handler got %v, want %v", event.NotAfter, last)
	}
}

// Where something else runs in the place of COMMIT, no event counts as recorded.
func TestInboxWhoseCommitIsAName(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	for _, stands := range []string{"SELECT 1", "ROLLBACK", rollsOn} {
		pool := p.configured(func(cfg *pgxpool.Config) {
			cfg.MaxConns = 2
			cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Prepare(ctx, "commit", stands)
				return err
			}
		})
		p.openOn(pool, inbox.Config{})
		for range 2 {
			receivertest.WantProblem(t, p.Post("k", "{}"), 503, "database-unavailable")
			p.WantRows("k", 0, 0)
		}
	}
}

// An event that comes from two destinations which lead to one inbox counts once. Of two receivers
// that were given one name, the second destination's event is refused.
func TestInboxOfTwoDestinations(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{Config: consumer.Config{Destinations: []string{"web", "stream"}}})
	p.record("k", receivertest.SentTo("web"))
	receivertest.WantReplayed(t, p.Do(p.NewRequest("k", `{"key":"k"}`, receivertest.SentTo("stream"))), http.StatusOK, `{"state":"pending"}`+"\n")
	same := p.again(inbox.Config{})
	receivertest.WantProblem(t, same.Do(same.NewRequest("k", "[]", receivertest.SentTo("chi"))), http.StatusMisdirectedRequest, "other-destination")
	other := p.again(inbox.Config{Config: consumer.Config{Receiver: "chi"}})
	other.record("k", receivertest.SentTo("chi"))
	p.run()
	other.run()
	p.wantWorked("k", consumer.ResultProcessed)
	other.wantWorked("k", consumer.ResultProcessed)
	testkit.Equal(t, "effects", p.Count("SELECT count(*) FROM effect"), 2)
}

// A replay of more than a batch, of many keys, while workers run: each takes effect once more, in
// order.
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
	testkit.Equal(t, "effects", p.Count("SELECT count(*) FROM effect"), 1500)
}

// An operator's command wakes the workers, which do not poll here: for what it replays, and for
// what waited behind an event that it ignores.
func TestInboxOperatorsWakeWorkers(t *testing.T) {
	t.Parallel()
	var refused sync.Map
	p := newInbox(t, inbox.Config{PollInterval: never, Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
		if _, again := refused.LoadOrStore(event.IdempotencyKey, true); !again && strings.HasPrefix(event.IdempotencyKey, "bad") {
			return consumer.Permanent(receivertest.ErrHandler)
		}
		return receivertest.EffectOf(ctx, event.IdempotencyKey)
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
			cfg.Config.Secrets = []string{receivertest.SecretText}
		}
		cfg.Config.Receiver = "test"
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

// In an inbox, an event that is newer than the receiver waits for the deploy, and holds up no
// other.
func TestRouterInAnInbox(t *testing.T) {
	t.Parallel()
	effects := func(ctx context.Context, _ pgx.Tx, event consumer.Event, _ struct{ Key string }) error {
		return receivertest.EffectOf(ctx, event.IdempotencyKey)
	}
	before := consumer.NewRouter()
	consumer.HandleJSON(before, "invoice.created", 1, effects)
	old := newInbox(t, inbox.Config{Handle: before.Dispatch, PollInterval: never})
	old.run()

	old.record("known")
	old.wantWorked("known", consumer.ResultProcessed)
	old.record("newer", receivertest.With(webhook.EventVersion, "2"), ordered("a", 1))
	if report := old.wantWorked("newer", consumer.ResultIgnored); !errors.Is(report.Err, consumer.ErrUnknownEvent) {
		t.Errorf("report %+v", report)
	}
	old.record("other", receivertest.With(webhook.EventType, "invoice.deleted"))
	old.wantWorked("other", consumer.ResultIgnored)
	old.record("next", ordered("a", 2))
	old.wantWorked("next", consumer.ResultProcessed)
	old.wantState("newer", inbox.StateIgnored, 1)
	testkit.Equal(t, "the reason is not there", old.Count("SELECT count(*) FROM inbox_events WHERE last_error = 'no handler for invoice.created version 2'"), 1)
	got := old.Do(old.NewRequest("malformed", `{"key":4711}`))
	if got.Status != http.StatusAccepted {
		t.Fatalf("status %d", got.Status)
	}
	if report := old.wantWorked("malformed", consumer.ResultFailed); !report.Final || strings.Contains(report.Err.Error(), "4711") {
		t.Errorf("report %+v", report)
	}
	old.wantState("malformed", inbox.StateFailed, 1)
	pgtest.Must(t, old.stop())

	after := consumer.NewRouter()
	consumer.HandleJSON(after, "invoice.*", 0, effects)
	deployed := old.again(inbox.Config{Handle: after.Dispatch, PollInterval: never})
	deployed.run()
	if n, err := deployed.replay(inboxops.Selection{Type: "invoice.*", States: []string{inboxops.Ignored}}); n != 2 || err != nil {
		t.Errorf("replayed %d, %v", n, err)
	}
	for range 2 {
		if report := deployed.worked(); report.Result != consumer.ResultProcessed {
			t.Errorf("report %+v", report)
		}
	}
	for _, key := range []string{"known", "newer", "other", "next"} {
		deployed.WantRows(key, 1, 1)
	}
}
