package consumer_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

func at(name string, t time.Time) func(http.Header) {
	return with(name, t.UTC().Format("2006-01-02T15:04:05.000000Z"))
}

func created(t time.Time) func(http.Header)  { return at(webhook.CreatedAt, t) }
func notAfter(t time.Time) func(http.Header) { return at(webhook.NotAfter, t) }

// yesterday is about the latest time of which the memory may say that nothing is known from before.
func yesterday() time.Time { return time.Now().Add(-25 * time.Hour) }

// announce says that what a source had sent before t may be gone.
func (e *env) announce(source string, t time.Time) {
	e.t.Helper()
	e.mustExec(`INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at) VALUES ('test', $1, $2, now())`, source, t)
}

func TestForgottenEventIsRefused(t *testing.T) {
	eachFlavourAlways(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{Receiver: "test", Source: "finance", Tolerance: time.Minute}, effect)
		mark := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
		e.announce("finance", mark)
		e.announce("sales", yesterday()) // another sender's matter

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
			got := e.do(e.newRequest(key, "{}", created(test.created)))
			if !test.refused {
				wantFirst(t, got, http.StatusCreated, `{"done":"`+key+`"}`)
				e.wantResult(consumer.ResultProcessed)
				e.wantRows(key, 1, 1)
				continue
			}
			wantProblem(t, got, http.StatusUnprocessableEntity, "forgotten")
			if report := e.wantResult(consumer.ResultForgotten); report.Event.Key != key || report.Status != http.StatusUnprocessableEntity {
				t.Errorf("%s: reported %+v", name, report)
			}
			e.wantRows(key, 0, 0)
			if line := `level=WARN msg="consumer: request forgotten" result=forgotten status=422 receiver=test source=finance key=` + key; !strings.Contains(e.logged.String(), line) {
				t.Errorf("%s: not logged: %s", name, e.logged)
			}
		}
	})
}

// What the sender does not say cannot be compared: such an event passes, and is why a memory has to be long enough.
func TestUndatedEventPasses(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect)
		e.announce("outbox", yesterday())
		wantFirst(t, e.post("undated", "{}"), http.StatusCreated, `{"done":"undated"}`)
	})
}

func TestEventBeyondItsSendersPromiseIsRefused(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{Tolerance: time.Hour}, effect)
		wantProblem(t, e.do(e.newRequest("late", "{}", notAfter(time.Now().Add(-2*time.Hour)))), http.StatusUnprocessableEntity, "forgotten")
		e.wantResult(consumer.ResultForgotten)
		e.wantRows("late", 0, 0)

		wantFirst(t, e.do(e.newRequest("clocks", "{}", notAfter(time.Now().Add(-30*time.Minute)))), http.StatusCreated, `{"done":"clocks"}`)
		e.wantRows("clocks", 1, 1)
	})
}

// However old an event is: what is known is no guess.
func TestKnownEventIsADuplicateAtAnyAge(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect)
		old := created(time.Now().AddDate(-1, 0, 0))
		wantFirst(t, e.do(e.newRequest("known", "{}", old)), http.StatusCreated, `{"done":"known"}`)

		e.announce("outbox", yesterday())
		passed := notAfter(time.Now().AddDate(0, -1, 0))
		wantReplayed(t, e.do(e.newRequest("known", "{}", old, passed)), http.StatusCreated, "")
		wantProblem(t, e.do(e.newRequest("known", "[]", old, passed)), http.StatusUnprocessableEntity, "key-reused")
		e.wantRows("known", 1, 1)

		release := e.hold(func(tx pgx.Tx) error {
			_, err := consumer.Once(t.Context(), tx, "test", "outbox", "busy")
			return err
		})
		wantProblem(t, e.do(e.newRequest("busy", "{}", old, passed)), http.StatusConflict, "in-flight")
		release()
	})
}

// Pruning needs to know until when the sender may send an event again.
func TestSendersPromiseIsKeptWithTheRow(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{SenderNotAfter: 10 * 24 * time.Hour}, effect)
		until := time.Date(2126, 1, 1, 0, 0, 0, 123456000, time.UTC)
		e.do(e.newRequest("said", "{}", notAfter(until), with(webhook.EventID, "4711")))
		e.do(e.newRequest("unsaid", "{}"))
		if n := e.count(`SELECT count(*) FROM processed_events
			WHERE idempotency_key = 'said' AND not_after = $1 AND event_id = 4711`, until); n != 1 {
			t.Error("the row does not say what the sender said")
		}
		if n := e.count(`SELECT count(*) FROM processed_events
			WHERE idempotency_key = 'unsaid' AND not_after = received_at + interval '10 days' AND event_id IS NULL`); n != 1 {
			t.Error("the row does not say what Config.SenderNotAfter says")
		}

		e = newEnv(t, f, consumer.Config{}, effect)
		e.post("unknown", "{}")
		if n := e.count(`SELECT count(*) FROM processed_events WHERE not_after IS NULL`); n != 1 {
			t.Error("the row says what was never said")
		}
	})
}
