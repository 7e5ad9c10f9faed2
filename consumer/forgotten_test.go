package consumer_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
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
			if report := e.WantResult(consumer.ResultForgotten); report.Event.Key != key || report.Status != http.StatusUnprocessableEntity {
				t.Errorf("%s: reported %+v", name, report)
			}
			e.WantRows(key, 0, 0)
			if line := `level=WARN msg="consumer: request forgotten" result=forgotten status=422 receiver=test source=finance key=` + key; !strings.Contains(e.Logged.String(), line) {
				t.Errorf("%s: not logged: %s", name, e.Logged)
			}
		}
	})
}

// What the sender does not say cannot be compared: such an event passes, and is why a memory has to be long enough.
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
			_, err := consumer.Once(t.Context(), tx, "test", "outbox", "busy")
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
		if n := e.Count(`SELECT count(*) FROM processed_events WHERE not_after IS NULL`); n != 1 {
			t.Error("the row says what was never said")
		}
	})
}
