package relay

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// promises returns what each request said, in the order in which they came.
func (rc *receiver) promises() (all []string) {
	for _, r := range rc.all() {
		all = append(all, r.header.Get(webhook.NotAfter))
	}
	return all
}

// stored is a promise as it stands in the database, spelled like the header; empty: there is none.
const stored = `SELECT coalesce(to_char(not_after AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), '') FROM outbox_delivery`

// The first request states when the last one comes, and all others say the same, whichever relay sends them. An attempt
// that reaches no receiver, and spends nothing, does not make the receiver forget what it was told before.
func TestPromiseIsKept(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, func(w http.ResponseWriter, r request) {
		if r.number <= 3 {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	d := to("")
	d.Retry.Schedule = []time.Duration{time.Hour}
	d.Retry.NotAfter = 500 * time.Hour
	before := row[time.Time](db, `SELECT now()`)
	db.insert(1, "key")
	for attempt := 1; attempt <= 5; attempt++ {
		if d.URL = rc.URL; attempt == 3 {
			d.URL = newVacant(t).url
		}
		r := start(t, db.config(d))
		r.await(t, "a settle", func(o *observer) bool {
			return o.outcomes[policy.Retry]+o.outcomes[policy.Delivered]+o.outcomes[policy.Hold] > 0
		})
		r.stop()
		want := rc.promises()[0]
		if attempt == 5 {
			want = "" // what was accepted is not sent again
		}
		if got := row[string](db, stored); got != want {
			t.Errorf("after attempt %d %q is stored, want %q", attempt, got, want)
		}
		db.exec(`UPDATE outbox_delivery SET next_attempt_at = now()`)
	}
	said := rc.promises()
	if len(said) != 4 {
		t.Errorf("%d requests", len(said))
	}
	for i, promise := range said {
		if promise != said[0] {
			t.Errorf("request %d of %d says %s, the first %s", i+1, len(said), promise, said[0])
		}
	}
	first, err := time.Parse(post.TimeFormat, said[0])
	must(t, err)
	if earliest := before.Add(d.Retry.NotAfter); first.Before(earliest) || first.After(row[time.Time](db, `SELECT now()`).Add(d.Retry.NotAfter)) {
		t.Errorf("the promise is %s, of a delivery that could be claimed from %s on", first, before)
	}
}

// A relay that is killed between a request and its settle leaves the promise behind: the next one gives no other.
func TestPromiseOutlivesItsRelay(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) {
		if r.number == 1 {
			g.pass(r)
		}
	})
	db.insert(1, "key")
	victim, said := startProcess(t, db.dsn, rc.URL)
	said("claimed")
	<-g.arrived
	rc.kill(t, victim)
	g.open()
	start(t, db.config(to(rc.URL))).settles(t, policy.Delivered, 1)
	if promises := rc.promises(); len(promises) != 2 || promises[0] != promises[1] || promises[0] == "" {
		t.Errorf("the requests say %q", promises)
	}
}

// What is pending when its promise ends, or so shortly before that a request could outlast it, is never sent. It fails
// with an alert that says what to do, and a replay makes a promise of its own.
func TestNothingIsSentPastItsPromise(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		left time.Duration
		sent bool
	}{
		"ended long ago":          {-1000 * time.Hour, false},
		"ends within the timeout": {post.DefaultTimeout - time.Second, false},
		"ends in more than that":  {post.DefaultTimeout + time.Hour, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			rc := newReceiver(t, nil)
			db.insert(1, "key")
			db.exec(`UPDATE outbox_delivery SET attempts = 3, last_attempt_at = now(), not_after = now() + $1::interval`, c.left)
			promise := row[string](db, stored)
			cfg := db.config(to(rc.URL))
			channel := &pager{name: "ops"}
			cfg.Alerts = alert.Config{Channels: []alert.Channel{channel}}
			r := start(t, cfg)
			if c.sent {
				r.settles(t, policy.Delivered, 1)
				if got := rc.promises(); got[0] != promise {
					t.Errorf("the request says %q, want %q", got, promise)
				}
				return
			}
			r.settles(t, policy.Fail, 1)
			if got := row[string](db, `SELECT concat_ws(' ', status, attempts, last_reason) FROM outbox_delivery`); got != "failed 3 not_after_passed" || rc.total() != 0 {
				t.Errorf("%s after %d requests", got, rc.total())
			}
			text := row[string](db, `SELECT last_error FROM outbox_delivery`)
			if !strings.Contains(text, promise[:len("2006-01-02T15:04:05")]+"Z") || !strings.Contains(text, "outbox-relay replay "+fmt.Sprint(row[int64](db, `SELECT event_id FROM outbox_delivery`))) {
				t.Error(text)
			}
			eventually(t, "the alert", func() bool { return len(channel.of(alert.RuleFailed)) == 1 })
			if got := channel.of(alert.RuleFailed)[0].FirstError; got != text {
				t.Errorf("the alert says %q", got)
			}

			done, err := ops.New(db.pool).Replay(t.Context(), ops.Selection{Reason: string(policy.ReasonNotAfter)}, 0, nil)
			must(t, err)
			if done.Done != 1 {
				t.Errorf("replayed %+v", done)
			}
			r.settles(t, policy.Delivered, 1)
			if got := rc.all()[0].header; got.Get(webhook.Replay) != "true" || got.Get(webhook.NotAfter) <= promise {
				t.Errorf("the replay's headers are %v", got)
			}
		})
	}
}

// An outage of 63 days, twice as long as what is promised. What never had a connection is promised nothing, and all of it
// is delivered, as is what was not tried until late; what its receiver may have seen is not sent when that can have
// forgotten it.
func TestOutageBeyondThePromise(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const waiting, weeks, week = 60, 9, 7 * 24 * time.Hour
	for name, answering := range map[string]bool{"connections are refused": false, "every answer is a 500": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			rc := newReceiver(t, nil)
			g := newSwitch(t, rc, answering)
			d := post.Destination{Name: "default", URL: g.url, MaxInFlight: 4}
			d.Breaker = policy.BreakerPolicy{ProbeAfter: 5 * time.Millisecond, ProbeMax: 20 * time.Millisecond}
			db.insert(waiting, "waiting")
			db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '60 days' WHERE event_id > 50`) // tried late
			r := start(t, db.config(d))
			becomes(db, "open", `SELECT coalesce((SELECT breaker FROM outbox_destination), '')`)
			for range weeks {
				before := sees(r.observer, func(o *observer) int { return len(o.attempts) })
				db.letPass(week)
				db.exec(`UPDATE outbox_delivery SET not_after = not_after - $1::interval WHERE claimed_by IS NULL`, week)
				r.await(t, "a probe", func(o *observer) bool { return len(o.attempts) > before || o.outcomes[policy.Fail] > 0 })
			}
			failed := sees(r.observer, func(o *observer) int { return o.outcomes[policy.Fail] })
			if !answering && failed > 0 {
				t.Errorf("%d have failed, which no receiver has seen", failed)
			}
			g.up()
			becomes(db, 0, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`)
			becomes(db, "closed", `SELECT breaker FROM outbox_destination`)
			wrong := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'failed' AND last_reason <> 'not_after_passed'
				OR status = 'failed' AND NOT $1 OR status = 'failed' AND event_id > 50`, answering)
			if delivered := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`); wrong > 0 || answering == (delivered == waiting) {
				t.Errorf("%d of %d delivered, %d failed that should not", delivered, waiting, wrong)
			}
		})
	}
}

// A stop gives back what was not sent, and what no connection was found for, as if it had never been claimed.
func TestOnlyWhatWasSentIsBound(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "default", "vacant")
	g := newGate(t)
	rc := newReceiver(t, func(_ http.ResponseWriter, r request) { g.pass(r) })
	d := to(rc.URL)
	d.MaxInFlight = 2
	vacant := post.Destination{Name: "vacant", URL: newVacant(t).url, MaxInFlight: 1, Breaker: policy.BreakerPolicy{Off: true}}
	vacant.Retry.Schedule = []time.Duration{time.Hour}
	db.insert(5, "key")
	r := start(t, db.config(d, vacant))
	<-g.arrived
	<-g.arrived
	r.await(t, "claims ahead", func(o *observer) bool { return o.outcomes[policy.Retry] == 5 })
	becomes(db, 4, `SELECT count(*) FROM outbox_delivery WHERE destination = 'default' AND not_after IS NOT NULL`)
	r.Abort()
	r.cancel()
	r.stop()
	for destination, want := range map[string]int{"default": 2, "vacant": 0} {
		if n := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE destination = $1 AND not_after IS NOT NULL AND status = 'pending'`, destination); n != want {
			t.Errorf("%d deliveries to %s are bound by a promise, want %d", n, destination, want)
		}
	}
}

// A switch stands before a receiver that is away at first: connections are refused there or, if answering, every answer is a 500.
type frontSwitch struct {
	url string
	up  func()
}

func newSwitch(t *testing.T, rc *receiver, answering bool) *frontSwitch {
	t.Helper()
	if !answering {
		front := newVacant(t)
		return &frontSwitch{url: front.url, up: func() { front.open(t, rc.Config.Handler) }}
	}
	var up atomic.Bool
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if up.Load() {
			rc.Config.Handler.ServeHTTP(w, r)
			return
		}
		w.WriteHeader(http.StatusInternalServerError)
	}))
	t.Cleanup(front.Close)
	return &frontSwitch{url: front.URL, up: func() { up.Store(true) }}
}
