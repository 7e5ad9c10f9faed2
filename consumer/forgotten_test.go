package consumer_test

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// yesterday is about the latest time of which the memory may say that nothing is known from before.
func yesterday() time.Time { return time.Now().Add(-25 * time.Hour) }

// announce says that what a source had sent before t may be gone.
func announce(e *receivertest.Env, source string, t time.Time) {
	e.T.Helper()
	e.MustExec(`INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at) VALUES ('test', $1, $2, now())`, source, t)
}

func TestForgottenEventIsRefused(t *testing.T) {
	receivertest.EachFlavourAlways(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{Receiver: "test", Source: "finance", Verify: consumer.Verify{Tolerance: time.Minute}}, receivertest.Effect)
		mark := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
		announce(e, "finance", mark)
		announce(e, "sales", yesterday()) // another sender's matter

		for name, test := range map[string]struct {
			created time.Time
			refused bool
		}{
			"long before":                   {mark.AddDate(-1, 0, 0), true},
			"year zero":                     {time.Date(0, 1, 1, 0, 0, 0, 0, time.UTC), true},
			"within the clocks' difference": {mark.Add(time.Minute - time.Microsecond), true},
			"just remembered":               {mark.Add(time.Minute), false},
			"long after":                    {mark.AddDate(0, 1, 0), false},
		} {
			key := strings.ReplaceAll(name, " ", "-")
			got := e.Do(e.NewRequest(key, "{}", receivertest.Created(test.created)))
			if !test.refused {
				receivertest.WantFirst(t, got, http.StatusCreated, `{"done":"`+key+`"}`)
				e.WantResult(consumer.ResultProcessed)
				e.WantRows(key, 1, 1)
				continue
			}
			receivertest.WantProblem(t, got, http.StatusUnprocessableEntity, "forgotten")
			if report := e.WantResult(consumer.ResultForgotten); report.Event.IdempotencyKey != key || report.Status != http.StatusUnprocessableEntity {
				t.Errorf("%s: reported %+v", name, report)
			}
			e.WantRows(key, 0, 0)
			if line := `level=WARN msg="consumer: request forgotten" result=forgotten http_status=422 receiver=test source=finance key=` + key; !strings.Contains(e.Logged.String(), line) {
				t.Errorf("%s: not logged: %s", name, e.Logged)
			}
		}
	})
}

// What the sender does not say cannot be compared: such an event passes, and is why a memory has to
// be long enough.
func TestUndatedEventPasses(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		announce(e, "outbox", yesterday())
		receivertest.WantFirst(t, e.Post("undated", "{}"), http.StatusCreated, `{"done":"undated"}`)
	})
}

func TestEventBeyondItsSendersPromiseIsRefused(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{Verify: consumer.Verify{Tolerance: time.Hour}}, receivertest.Effect)
		receivertest.WantProblem(t, e.Do(e.NewRequest("late", "{}", receivertest.NotAfter(time.Now().Add(-2*time.Hour)))), http.StatusUnprocessableEntity, "forgotten")
		e.WantResult(consumer.ResultForgotten)
		e.WantRows("late", 0, 0)

		receivertest.WantFirst(t, e.Do(e.NewRequest("clocks", "{}", receivertest.NotAfter(time.Now().Add(-30*time.Minute)))), http.StatusCreated, `{"done":"clocks"}`)
		e.WantRows("clocks", 1, 1)
	})
}

// However old an event is: what is known is no guess.
func TestKnownEventIsADuplicateAtAnyAge(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		old := receivertest.Created(time.Now().AddDate(-1, 0, 0))
		receivertest.WantFirst(t, e.Do(e.NewRequest("known", "{}", old)), http.StatusCreated, `{"done":"known"}`)

		announce(e, "outbox", yesterday())
		passed := receivertest.NotAfter(time.Now().AddDate(0, -1, 0))
		receivertest.WantReplayed(t, e.Do(e.NewRequest("known", "{}", old, passed)), http.StatusCreated, "")
		receivertest.WantProblem(t, e.Do(e.NewRequest("known", "[]", old, passed)), http.StatusUnprocessableEntity, "key-reused")
		e.WantRows("known", 1, 1)

		release := e.Hold(func(tx pgx.Tx) error {
			_, err := consumer.Once(t.Context(), tx, consumer.Event{Receiver: "test", Source: "outbox", IdempotencyKey: "busy"})
			return err
		})
		receivertest.WantProblem(t, e.Do(e.NewRequest("busy", "{}", old, passed)), http.StatusConflict, "in-flight")
		release()
	})
}

// Pruning needs to know until when the sender may send an event again.
func TestSendersPromiseIsKeptWithTheRow(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{SenderNotAfter: 10 * 24 * time.Hour}, receivertest.Effect)
		until := time.Date(2126, 1, 1, 0, 0, 0, 123456000, time.UTC)
		e.Do(e.NewRequest("said", "{}", receivertest.NotAfter(until), receivertest.With(webhook.EventID, "4711")))
		e.Do(e.NewRequest("unsaid", "{}"))
		if n := e.Count(`SELECT count(*) FROM processed_events
			WHERE idempotency_key = 'said' AND not_after = $1 AND event_id = 4711`, until); n != 1 {
			t.Error("the row does not say what the sender said")
		}
		if n := e.Count(`SELECT count(*) FROM processed_events
			WHERE idempotency_key = 'unsaid' AND not_after = received_at + interval '10 days' AND event_id IS NULL`); n != 1 {
			t.Error("the row does not say what Config.SenderNotAfter says")
		}

		e = receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		e.Post("unknown", "{}")
		testkit.Equal(t, "the row says what was never said", e.Count(`SELECT count(*) FROM processed_events WHERE not_after IS NULL`), 1)
	})
}

// Fifty senders repeat events of today and of three months ago for as long as it takes until ten of
// these were processed, grew old, were announced, removed and refused. No effect happens twice, and
// nothing is refused without an announcement.
func TestPruneUnderDuplicates(t *testing.T) {
	underDuplicates := func(t *testing.T, f receivertest.Flavour) {
		for _, isolation := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
			t.Run(isolation.String(), func(t *testing.T) {
				if isolation != sql.LevelReadCommitted {
					testsize.Long(t)
				}
				t.Parallel()
				pruneUnderDuplicates(t, f, isolation)
			})
		}
	}
	t.Run("inbox", func(t *testing.T) {
		t.Parallel()
		underDuplicates(t, recording)
	})
	receivertest.EachFlavour(t, underDuplicates)
}

// recording is a receiver that records events, and works them in the same process.
var recording = receivertest.Flavour{
	Name: "inbox",
	Wrap: func(t testing.TB, dsn string, cfg consumer.Config) func(http.Handler) http.Handler {
		in := receivertest.Must(inbox.New(receivertest.PoolOf(t, dsn, 12), inbox.Config{
			Config: cfg,
			Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
				return receivertest.EffectOf(ctx, event.IdempotencyKey)
			},
		}))
		ctx, stop := context.WithCancel(context.Background())
		var working sync.WaitGroup
		working.Go(func() {
			if err := in.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		t.Cleanup(working.Wait)
		t.Cleanup(stop)
		return func(http.Handler) http.Handler { return in.Handler() }
	},
	Prune: receivertest.PGX().Prune,
}

func pruneUnderDuplicates(t *testing.T, f receivertest.Flavour, isolation sql.IsolationLevel) {
	const senders, keys, enough = 30, 30, 6
	var done atomic.Bool
	ignore := func(_ context.Context, _ consumer.Report) {}
	e := receivertest.NewEnv(t, f, consumer.Config{Isolation: isolation, Observe: ignore}, receivertest.Effect)
	e.MustExec(`CREATE TABLE refused (key text NOT NULL)`)
	old := receivertest.LongAgo()

	send := func() error {
		key, change := fmt.Sprint("new", rand.IntN(keys)), receivertest.Created(time.Now())
		isOld := rand.IntN(2) == 0
		if isOld {
			key, change = fmt.Sprint("old", rand.IntN(keys)), old
		}
		got, err := e.Try(e.NewRequest(key, "{}", change))
		switch {
		case err != nil:
			return err
		case got.Status == http.StatusUnprocessableEntity:
			var announced bool
			err := e.Pool.QueryRow(t.Context(), `SELECT coalesce(bool_or(received_before > now() - interval '91 days'), false) FROM inbox_forgotten`).Scan(&announced)
			if err != nil {
				return err
			}
			if !announced || !isOld {
				return fmt.Errorf("%s was refused, announced: %v", key, announced)
			}
			_, err = e.Pool.Exec(t.Context(), `INSERT INTO refused VALUES ($1)`, key)
			return err
		case got.Status == http.StatusOK, got.Status == http.StatusCreated, got.Status == http.StatusAccepted, got.Status == http.StatusConflict, got.Status == http.StatusServiceUnavailable:
			return nil
		}
		return fmt.Errorf("%s: %d %s", key, got.Status, got.Body)
	}
	var wg sync.WaitGroup
	for range senders {
		wg.Go(func() {
			for !done.Load() {
				if err := send(); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	defer wg.Wait()
	defer done.Store(true)

	cfg := receivertest.Ninety()
	cfg.BatchPages, cfg.Pause = 1, time.Microsecond
	refused := 0
	e.Await(`SELECT count(*) > $1 FROM processed_events WHERE idempotency_key LIKE 'old%'`, enough)
	for removed := int64(0); (removed < enough || refused < enough) && !t.Failed(); {
		// Half of what was processed, and is done, is suddenly old: from here on a request for it
		// may meet its removal.
		e.MustExec(`WITH aged AS (
				UPDATE processed_events p SET received_at = received_at - interval '91 days', processed_at = processed_at - interval '91 days'
				WHERE idempotency_key LIKE 'old%' AND received_at > now() - interval '1 day' AND random() < 0.5 AND NOT EXISTS (
					SELECT FROM inbox_events e WHERE e.idempotency_key = p.idempotency_key AND e.processing_state <> 'succeeded')
				RETURNING idempotency_key
			)
			UPDATE inbox_events SET received_at = received_at - interval '91 days', processed_at = processed_at - interval '91 days'
			WHERE idempotency_key IN (SELECT idempotency_key FROM aged)`)
		removed += e.MustPrune(cfg).Removed
		e.Settle()
		refused = e.Count(`SELECT count(DISTINCT key) FROM refused`)
		testkit.Equal(t, "effects happened twice", e.Count(`SELECT count(*) FROM (SELECT key FROM effect GROUP BY key HAVING count(*) > 1) twice`), 0)
	}
	done.Store(true)
	wg.Wait()
	e.Await(`SELECT NOT EXISTS (SELECT FROM inbox_events WHERE processing_state IN ('pending', 'processing'))`)
	if n := e.Count(`SELECT count(*) FROM processed_events p WHERE (SELECT count(*) FROM effect WHERE key = p.idempotency_key) <> 1`); n != 0 {
		t.Errorf("%d events are known without their effect", n)
	}
	if n := e.Count(`SELECT count(DISTINCT key) FROM effect WHERE key LIKE 'new%'`); n == 0 || n != e.Count(`SELECT count(*) FROM processed_events WHERE idempotency_key LIKE 'new%'`) {
		t.Errorf("%d new events took effect, which is not what is known", n)
	}
}
