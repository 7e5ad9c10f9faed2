package consumer_test

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// batchRequest is a batch of events with these keys, as a relay sends it.
func batchRequest(e *receivertest.Env, keys ...string) *http.Request {
	var body []byte
	for _, key := range keys {
		body = webhook.AppendLine(body, webhook.Envelope{
			Header: map[string]string{
				webhook.IdempotencyKey: key, webhook.EventType: "invoice.created", webhook.Attempt: "1", "Content-Type": "application/json",
			}, Body: []byte("{}"),
		})
	}
	return signedBatch(e, len(keys), body)
}

func signedBatch(e *receivertest.Env, events int, body []byte) *http.Request {
	signed := webhook.NewSigner(receivertest.Secret()).SignBatch(webhook.AppendCovered(nil, webhook.Batch, strconv.Itoa(events)), body, time.Now())
	r := receivertest.Must(http.NewRequestWithContext(e.T.Context(), http.MethodPost, e.URL, strings.NewReader(string(body))))
	r.Header = http.Header{
		"Content-Type": {webhook.BatchType}, webhook.Batch: {strconv.Itoa(events)},
		webhook.ID: {signed.ID}, webhook.Timestamp: {signed.Timestamp}, webhook.Signature: {signed.Signature},
	}
	return r
}

// wantBatch sends a batch and asserts the status of each of its events.
func wantBatch(e *receivertest.Env, r *http.Request, want map[string]int) map[string]webhook.BatchResult {
	e.T.Helper()
	answer := e.Do(r)
	if answer.Status != http.StatusOK || answer.Header.Get("Content-Type") != webhook.BatchResultType {
		e.T.Fatalf("the batch was answered %d %v: %s", answer.Status, answer.Header, answer.Body)
	}
	results := webhook.ParseBatchResults([]byte(answer.Body))
	got := map[string]int{}
	for key, result := range results {
		got[key] = result.Status
	}
	if !maps.Equal(got, want) {
		e.T.Errorf("answered %v, want %v", got, want)
	}
	return results
}

// A batch that fails in part: what fails, in whatever way, fails alone, and the others commit.
func TestBatchPoisonFailsAlone(t *testing.T) {
	t.Parallel()
	e := receivertest.NewHandlerEnv(t, receivertest.PGX(), unhurried(), func(*receivertest.Env) receivertest.HandlerFunc {
		return func(ctx context.Context, _ consumer.Event) error {
			tx, key := consumer.Tx(ctx), consumer.EventFrom(ctx).IdempotencyKey
			if err := receivertest.EffectOf(ctx, key); err != nil {
				return err
			}
			switch key {
			case "error":
				return errors.New("poison")
			case "permanent":
				return consumer.Permanent(errors.New("never"))
			case "panic":
				panic("poison")
			case "abort":
				panic(http.ErrAbortHandler)
			case "goexit":
				runtime.Goexit()
			case "broken":
				_, err := tx.Exec(ctx, "SELECT 1/0")
				return err
			case "hidden":
				_, _ = tx.Exec(ctx, "SELECT 1/0")
			case "rollback":
				_ = tx.Rollback(ctx)
			case "nested":
				if _, err := tx.Begin(ctx); err != nil {
					return err
				}
			case "ignored":
				return consumer.Ignore("of no concern")
			}
			return nil
		}
	})
	keys := []string{"a", "error", "b", "permanent", "panic", "c", "abort", "goexit", "d", "broken", "hidden", "e", "rollback", "f", "nested", "ignored", "g"}
	want := map[string]int{
		"a": 204, "b": 204, "c": 204, "d": 204, "e": 204, "f": 204, "g": 204, "nested": 204, "ignored": 204,
		"error": 500, "permanent": 422, "panic": 500, "abort": 500, "goexit": 500, "broken": 500, "hidden": 500, "rollback": 500,
	}
	results := wantBatch(e, batchRequest(e, keys...), want)
	testkit.Contains(t, "the refusal", results["permanent"].Body, "never")
	for key, status := range want {
		rows := 0
		if status == 204 {
			rows = 1
		}
		e.WantRows(key, rows, rows)
	}
	testkit.Equal(t, "reports", len(e.Reports), len(keys))
	// The connection is another event's now.
	receivertest.WantFirst(t, e.Post("alone", "{}"), 204, "")
}

// Duplicates are suppressed within a batch, across batches, and across batches and requests of one
// event.
func TestBatchSuppressesDuplicates(t *testing.T) {
	t.Parallel()
	e := receivertest.NewEnv(t, receivertest.PGX(), unhurried(), receivertest.Effect)
	alone := e.Post("alone", "{}")
	if alone.Header.Get(webhook.AcceptPost) != webhook.BatchType {
		t.Errorf("the receiver does not say that it takes batches: %v", alone.Header)
	}
	// Answers with one key count as none for the sender: each is in its own batch text here.
	answer := e.Do(batchRequest(e, "k", "k", "alone", "l"))
	if n := strings.Count(answer.Body, `"key":"k","status":201`); n != 2 || strings.Count(answer.Body, `"replayed":true`) != 2 {
		t.Errorf("answered %s", answer.Body)
	}
	wantBatch(e, batchRequest(e, "l", "m"), map[string]int{"l": 201, "m": 201})
	if got := e.Post("m", "{}"); got.Status != 201 || got.Header.Get(webhook.Replayed) != "true" {
		t.Errorf("a duplicate of an event of a batch was answered %d %v", got.Status, got.Header)
	}
	for _, key := range []string{"alone", "k", "l", "m"} {
		e.WantRows(key, 1, 1)
	}
}

// No event of a batch has its 2xx when the commit fails.
func TestBatchCommitFailsAll(t *testing.T) {
	t.Parallel()
	e := receivertest.NewHandlerEnv(t, receivertest.PGX(), unhurried(), func(*receivertest.Env) receivertest.HandlerFunc {
		return func(ctx context.Context, _ consumer.Event) error {
			if consumer.EventFrom(ctx).IdempotencyKey == "orphan" {
				if _, err := consumer.Tx(ctx).Exec(ctx, "INSERT INTO child VALUES (1)"); err != nil { // fails at COMMIT
					return err
				}
			}
			return receivertest.EffectOf(ctx, consumer.EventFrom(ctx).IdempotencyKey)
		}
	})
	wantBatch(e, batchRequest(e, "a", "orphan", "b"), map[string]int{"a": 500, "orphan": 500, "b": 500})
	for range 3 {
		e.WantResult(consumer.ResultCommitFailed)
	}
	for _, key := range []string{"a", "orphan", "b"} {
		e.WantRows(key, 0, 0)
	}
	wantBatch(e, batchRequest(e, "a", "b"), map[string]int{"a": 204, "b": 204})
}

// unhurried returns a Config with which no batch is parted because the machine is busy.
func unhurried() consumer.Config {
	return consumer.Config{Limits: consumer.Limits{BatchLocks: time.Hour}}
}

// Events that have taken long enough are committed before the next handler runs.
func TestBatchReleasesItsLocksInTime(t *testing.T) {
	t.Parallel()
	seen := map[string]int{} // effects of events before, as others see them
	cfg := consumer.Config{Limits: consumer.Limits{BatchLocks: 1}}
	e := receivertest.NewHandlerEnv(t, receivertest.PGX(), cfg, func(e *receivertest.Env) receivertest.HandlerFunc {
		return func(ctx context.Context, event consumer.Event) error {
			seen[event.IdempotencyKey] = e.Count("SELECT count(*) FROM effect")
			return receivertest.EffectOf(ctx, event.IdempotencyKey)
		}
	})
	wantBatch(e, batchRequest(e, "a", "b", "c"), map[string]int{"a": 204, "b": 204, "c": 204})
	if want := map[string]int{"a": 0, "b": 1, "c": 2}; !maps.Equal(seen, want) {
		t.Errorf("others see %v, want %v", seen, want)
	}
}

// After a conflict, the events before it are committed, and what they have locked is released,
// before the next handler runs.
func TestBatchReleasesItsLocksAfterAConflict(t *testing.T) {
	t.Parallel()
	seen := map[string]int{} // effects of events before, as others see them
	e := receivertest.NewHandlerEnv(t, receivertest.PGX(), unhurried(), func(e *receivertest.Env) receivertest.HandlerFunc {
		return func(ctx context.Context, event consumer.Event) error {
			seen[event.IdempotencyKey] = e.Count("SELECT count(*) FROM effect")
			if event.IdempotencyKey == "conflict" {
				_, err := consumer.Tx(ctx).Exec(ctx, "DO $$ BEGIN RAISE SQLSTATE '40P01'; END $$")
				return err
			}
			return receivertest.EffectOf(ctx, event.IdempotencyKey)
		}
	})
	wantBatch(e, batchRequest(e, "a", "b", "conflict", "c", "d"), map[string]int{"a": 204, "b": 204, "conflict": 503, "c": 204, "d": 204})
	if want := map[string]int{"a": 0, "b": 0, "conflict": 0, "c": 2, "d": 2}; !maps.Equal(seen, want) {
		t.Errorf("others see %v, want %v", seen, want)
	}
	for key, rows := range map[string]int{"a": 1, "b": 1, "conflict": 0, "c": 1, "d": 1} {
		e.WantRows(key, rows, rows)
	}
}

// A handler that commits the batch's transaction by itself loses its own event alone; the others
// are sent again, and take effect once.
func TestBatchSurvivesAHandlerThatCommits(t *testing.T) {
	t.Parallel()
	e := receivertest.NewHandlerEnv(t, receivertest.PGX(), unhurried(), func(*receivertest.Env) receivertest.HandlerFunc {
		return func(ctx context.Context, _ consumer.Event) error {
			if err := receivertest.EffectOf(ctx, consumer.EventFrom(ctx).IdempotencyKey); err != nil || consumer.EventFrom(ctx).IdempotencyKey != "commits" {
				return err
			}
			_, err := consumer.Tx(ctx).Conn().Exec(ctx, "COMMIT")
			return err
		}
	})
	wantBatch(e, batchRequest(e, "a", "commits", "b"), map[string]int{"a": 500, "commits": 500, "b": 204})
	wantBatch(e, batchRequest(e, "a", "commits", "b"), map[string]int{"a": 204, "commits": 422, "b": 204})
	for _, key := range []string{"a", "commits", "b"} {
		e.WantRows(key, 1, 1)
	}
}

// A connection that was lost while it was idle costs a batch one event, as it costs one that comes
// alone.
func TestBatchBeginsOnAnotherConnection(t *testing.T) {
	t.Parallel()
	dsn := receivertest.WithSetting(pgtest.New(t, migrations.Inbox), "pool_max_conns", "1")
	e := receivertest.NewEnvAt(t, receivertest.PGX(), dsn, unhurried(), receivertest.Effect)
	e.MustExec(receivertest.Schema)
	receivertest.WantFirst(t, e.Post("before", "{}"), 201, `{"done":"before"}`)
	e.MustExec("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")
	results := webhook.ParseBatchResults([]byte(e.Do(batchRequest(e, "a", "b", "c")).Body))
	for _, key := range []string{"b", "c"} { // "a", too, where the pool has found out by itself
		testkit.Equal(t, key, results[key].Status, 201)
		e.WantRows(key, 1, 1)
	}
}

// A batch that takes longer than its client waits says nothing of what its handlers depend on.
func TestSlowBatchLeavesTheBreakerClosed(t *testing.T) {
	t.Parallel()
	cfg := unhurried()
	cfg.Breaker = receivertest.Must(breaker.New(breaker.Config{Failures: 1}))
	ctx, hangUp := context.WithCancel(t.Context())
	e := receivertest.NewHandlerEnv(t, receivertest.PGX(), cfg, func(*receivertest.Env) receivertest.HandlerFunc {
		return func(ctx context.Context, event consumer.Event) error {
			if event.IdempotencyKey == "slow" {
				<-time.After(1100 * time.Millisecond) // longer than a client is impatient
				return nil
			}
			hangUp()
			<-ctx.Done()
			return consumer.DependencyDown(context.Cause(ctx))
		}
	})
	_, err := e.Try(batchRequest(e, "slow", "cut", "left", "out").WithContext(ctx))
	testkit.ErrorIs(t, "the client", err, context.Canceled)
	for _, want := range []consumer.Result{consumer.ResultProcessed, consumer.ResultFailed, consumer.ResultUnavailable, consumer.ResultUnavailable} {
		e.WantResult(want)
	}
	testkit.Equal(t, "the breaker", cfg.Breaker.State(), breaker.Closed)
}

// Strangers and mistakes: nothing is worked, and the answer is a refusal by which a relay falls
// back.
func TestBatchRefusals(t *testing.T) {
	t.Parallel()
	e := receivertest.NewEnv(t, receivertest.PGX(), unhurried(), receivertest.Effect)
	line := `{"headers":{"X-Idempotency-Key":"k"},"body":"e30="}` + "\n"
	for name, c := range map[string]struct {
		request func() *http.Request
		status  int
		problem string
	}{
		"other count": {func() *http.Request { return signedBatch(e, 2, []byte(line)) }, 400, "batch-invalid"},
		"too many":    {func() *http.Request { return signedBatch(e, webhook.MaxBatchEvents+1, []byte(line)) }, 400, "batch-invalid"},
		"no lines":    {func() *http.Request { return signedBatch(e, 1, []byte("{")) }, 400, "batch-invalid"},
		"other type": {func() *http.Request {
			r := batchRequest(e, "k")
			r.Header.Set("Content-Type", "application/json")
			return r
		}, 400, "batch-invalid"},
		"no type": {func() *http.Request {
			r := batchRequest(e, "k")
			r.Header.Del("Content-Type")
			return r
		}, 400, "batch-invalid"},
		"unsigned": {func() *http.Request {
			r := batchRequest(e, "k")
			r.Header.Del(webhook.Signature)
			return r
		}, 401, "signature-invalid"},
		"changed": {func() *http.Request {
			r := batchRequest(e, "k", "l")
			r.Header.Set(webhook.Batch, "1")
			return r
		}, 401, "signature-invalid"},
		"old": {func() *http.Request {
			r := batchRequest(e, "k")
			r.Header.Set(webhook.Timestamp, "1614265330")
			return r
		}, 401, "timestamp-out-of-tolerance"},
		"too large": {func() *http.Request { return signedBatch(e, 1, []byte(strings.Repeat(line, 1<<20/len(line)+1))) }, 413, "body-too-large"},
	} {
		t.Run(name, func(t *testing.T) { receivertest.WantProblem(t, e.Do(c.request()), c.status, c.problem) })
	}
	e.WantRows("k", 0, 0)
	foreign := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{Verify: consumer.Verify{AcceptForeign: true}}, receivertest.Effect)
	stripped := batchRequest(foreign, "k")
	stripped.Header.Del(webhook.Batch) // v1 still matches
	receivertest.WantProblem(t, foreign.Do(stripped), 401, "signature-invalid")
	testkit.Equal(t, "events of a batch that passed for an event", foreign.Count("SELECT count(*) FROM processed_events"), 0)
	nested := []byte(`{"headers":{"X-Idempotency-Key":"n","X-Outbox-Batch":"1"},"body":"e30="}` + "\n")
	wantBatch(e, signedBatch(e, 1, nested), map[string]int{"n": 400})
	typed := batchRequest(e, "typed")
	typed.Header.Set("Content-Type", "Application/vnd.outbox-relay.batch+ndjson; charset=utf-8") // as something on the way writes it
	wantBatch(e, typed, map[string]int{"typed": 201})
	// A malformed event fails alone.
	mixed := []byte(`{"headers":{"X-Idempotency-Key":"bad","X-Outbox-Attempt":"x"},"body":"e30="}` + "\n" + line)
	wantBatch(e, signedBatch(e, 2, mixed), map[string]int{"bad": 400, "k": 201})
}

// Receivers that do not know batches refuse them before they read the body, and do not say that
// they take any.
func TestBatchIsRefusedByOtherReceivers(t *testing.T) {
	t.Parallel()
	for name, e := range map[string]*receivertest.Env{
		"sqlconsumer":  receivertest.NewEnv(t, receivertest.SQL(), unhurried(), receivertest.Effect),
		"small bodies": receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{Limits: consumer.Limits{MaxBodyBytes: webhook.MaxBatchBytes - 1}}, receivertest.Effect),
	} {
		receivertest.WantProblem(t, e.Do(batchRequest(e, "k")), 400, "key-missing")
		if answer := e.Post("l", "{}"); answer.Header.Get(webhook.AcceptPost) != "" {
			t.Errorf("%s: %v", name, answer.Header)
		}
	}
}

// A handler gets the same for an event of a batch as for one that comes alone.
func TestBatchEventIsLikeASingleOne(t *testing.T) {
	t.Parallel()
	seen := make(chan http.Header, 2)
	e := receivertest.NewEnv(t, receivertest.PGX(), unhurried(), func(*receivertest.Env) http.HandlerFunc {
		return func(_ http.ResponseWriter, r *http.Request) {
			h := r.Header.Clone()
			for _, name := range []string{"Accept-Encoding", "User-Agent", "Content-Length", webhook.Timestamp, webhook.Signature} {
				h.Del(name)
			}
			seen <- h
		}
	})
	receivertest.WantFirst(t, e.Post("k", "{}"), 200, "")
	wantBatch(e, batchRequest(e, "l"), map[string]int{"l": 200})
	single, batched := <-seen, <-seen
	single.Set(webhook.IdempotencyKey, "l")
	single.Set(webhook.ID, webhook.DeriveID("l"))
	if !maps.EqualFunc(single, batched, func(a, b []string) bool { return strings.Join(a, "\n") == strings.Join(b, "\n") }) {
		t.Errorf("alone %v, in a batch %v", single, batched)
	}
}
