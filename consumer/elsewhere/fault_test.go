package elsewhere

import (
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// carelessHandlers runs the cases that each language has for types of events that begin with
// "test.".
func carelessHandlers(t *testing.T, r *receiver) {
	typed := func(name string) signing { return signing{change: set(webhook.EventType, "test."+name)} }

	// After an error that the handler does not pass on, PostgreSQL turns COMMIT into ROLLBACK, and
	// many drivers do not say so.
	wantProblem(t, r.send(t, "k9 swallows", invoice("INV-9"), typed("swallows")), 500, "commit-failed")
	r.wantRows(t, "k9 swallows", "INV-9", 0, 0)

	// What the handler has committed is remembered, and what it has not is unknown.
	wantProblem(t, r.send(t, "k9 commits", invoice("INV-9"), typed("commits")), 500, "handler-ended-transaction")
	wantDuplicate(t, r.send(t, "k9 commits", invoice("INV-9"), typed("commits")), 422)

	// Every connection of a pool gets the setting and the table, and each event comes again.
	for range 2 {
		var answers []<-chan answer
		for _, key := range []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"} {
			answers = append(answers, r.beginAs(t, r.url, "k9 "+key, invoice("INV-9 "+key), typed("search-path")))
		}
		for _, answers := range answers {
			if got := <-answers; got.status != 204 {
				t.Errorf("got %+v, want 204", got)
			}
		}
	}
	var effects int
	if err := r.pool.QueryRow(t.Context(), "SELECT count(*) FROM shipments WHERE invoice LIKE 'INV-9 _'").Scan(&effects); err != nil || effects != 12 {
		t.Errorf("%d effects of 12 events whose handler changes search_path (%v)", effects, err)
	}
}

func inFlight(t *testing.T, r *receiver) {
	body := invoice("HOLD-10")
	release := r.hold(t)
	first := r.begin(t, r.url, "k10", body)
	r.held(t)
	wantProblem(t, r.send(t, "k10", body, signing{}), 409, "in-flight")
	wantProblem(t, r.send(t, "k10", invoice("INV-10"), signing{}), 409, "in-flight")
	wantFirst(t, r.send(t, "k10 other", invoice("INV-10"), signing{})) // others do not wait
	release()
	wantFirst(t, <-first)
	wantDuplicate(t, r.send(t, "k10", body, signing{}), 204)
	r.wantRows(t, "k10", "HOLD-10", 1, 1)
}

func forgotten(t *testing.T, r *receiver) {
	r.exec(t, `INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at)
		VALUES ('shipping', 'finance', now() - interval '2 days', now()), ('billing', 'finance', now() - interval '1 day', now())`)
	created := func(ago time.Duration) signing {
		return signing{change: set(webhook.CreatedAt, stamp(time.Now().Add(-ago)))}
	}
	wantProblem(t, r.send(t, "k11 old", invoice("INV-11"), created(49*time.Hour)), 422, "forgotten")
	// The clocks of two machines may differ.
	wantProblem(t, r.send(t, "k11 edge", invoice("INV-11"), created(48*time.Hour-time.Minute)), 422, "forgotten")
	r.wantRows(t, "k11 old", "INV-11", 0, 0)
	r.wantRows(t, "k11 edge", "INV-11", 0, 0)
	wantFirst(t, r.send(t, "k11 young", invoice("INV-11"), created(47*time.Hour)))
	wantDuplicate(t, r.send(t, "k11 young", invoice("INV-11"), created(49*time.Hour)), 204) // it is known

	late := func(h http.Header) { h[webhook.NotAfter] = []string{stamp(time.Now().Add(-6 * time.Minute))} }
	wantProblem(t, r.send(t, "k11 late", invoice("INV-11 late"), signing{change: late}), 422, "forgotten")
	r.wantRows(t, "k11 late", "INV-11 late", 0, 0)
}

// killed sends an event, kills the receiver while the database holds its transaction, and returns
// when that has ended.
func (r *receiver) killed(t *testing.T, key, body string) {
	t.Helper()
	release := r.hold(t)
	lost := r.begin(t, r.url, key, body)
	session := r.held(t)
	r.kill()
	if got := <-lost; got.status != 0 {
		t.Errorf("a killed receiver answered %+v", got)
	}
	release()
	r.gone(t, session)
}

func killedAfterTheEffect(t *testing.T, r *receiver) {
	body := invoice("HOLD-12")
	r.killed(t, "k12", body)
	r.wantRows(t, "k12", "HOLD-12", 0, 0)
	r.start(t)
	wantFirst(t, r.send(t, "k12", body, signing{}))
	r.wantRows(t, "k12", "HOLD-12", 1, 1)
}

func killedWhileCommitting(t *testing.T, r *receiver) {
	body := invoice("COMMIT-HOLD-13")
	r.killed(t, "k13", body)
	r.wantRows(t, "k13", "COMMIT-HOLD-13", 1, 1) // PostgreSQL had the COMMIT
	r.start(t)
	wantDuplicate(t, r.send(t, "k13", body, signing{}), 204)
	r.wantRows(t, "k13", "COMMIT-HOLD-13", 1, 1)
}

func databaseTrouble(t *testing.T, r *receiver) {
	release := r.hold(t)
	cut := r.begin(t, r.url, "k14", invoice("HOLD-14"))
	session := r.held(t)
	r.exec(t, "SELECT pg_terminate_backend($1)", session)
	wantProblem(t, <-cut, 500, "handler-failed")
	release()
	r.wantRows(t, "k14", "HOLD-14", 0, 0)
	wantFirst(t, r.send(t, "k14", invoice("HOLD-14"), signing{}))

	// A pool may find out about each lost connection by a request that fails.
	r.exec(t, "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = current_database() AND client_addr IS NOT NULL")
	const mostConnections = 10
	for try := 0; ; try++ {
		got := r.send(t, "k14 lost", invoice("INV-14 lost"), signing{})
		if got.status == 204 {
			break
		}
		if wantProblem(t, got, 503, "database-unavailable"); try == mostConnections {
			t.Fatal("the receiver does not connect again")
		}
	}
	r.wantRows(t, "k14 lost", "INV-14 lost", 1, 1)

	r.exec(t, "ALTER TABLE processed_events RENAME TO away")
	wantProblem(t, r.send(t, "k14 away", invoice("INV-14"), signing{}), 503, "database-unavailable")
	r.exec(t, "ALTER TABLE away RENAME TO processed_events")
	wantFirst(t, r.send(t, "k14 away", invoice("INV-14"), signing{}))
	r.wantRows(t, "k14 away", "INV-14", 1, 1)
}

// besideGo runs a receiver of package consumer on the same table, under the same name.
func besideGo(t *testing.T, r *receiver) {
	inGo := goReceiver(t, r.dsn)
	var answers []<-chan answer
	for range 10 {
		answers = append(answers, r.begin(t, r.url, "k15", invoice("INV-15")), r.begin(t, inGo, "k15", invoice("INV-15")))
	}
	wantOne(t, answers)
	r.wantRows(t, "k15", "INV-15", 1, 1)
	for _, urls := range [][]string{{r.url, inGo}, {inGo, r.url}} {
		key, body := "k15 held at "+urls[0], invoice("HOLD-15 at "+urls[0])
		release := r.hold(t)
		first := r.begin(t, urls[0], key, body)
		r.held(t)
		wantProblem(t, <-r.begin(t, urls[1], key, body), 409, "in-flight")
		release()
		wantFirst(t, <-first)
		wantDuplicate(t, <-r.begin(t, urls[1], key, body), 204)
		wantProblem(t, <-r.begin(t, urls[1], key, invoice("INV-15")), 422, "key-reused")
		r.wantRows(t, key, "HOLD-15 at "+urls[0], 1, 1)
	}
}
