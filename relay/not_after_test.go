package relay

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// promises returns what each request said, in the order in which they came.
func promises(rc *relaytest.Receiver) (all []string) {
	for _, r := range rc.All() {
		all = append(all, r.Header.Get(webhook.NotAfter))
	}
	return all
}

// stored is a promise as it stands in the database, spelled like the header; empty: there is none.
const stored = `SELECT coalesce(to_char(not_after AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), '') FROM outbox_delivery`

// The first request states when the last one comes, and all others say the same, whichever relay
// sends them. An attempt that reaches no receiver, and spends nothing, does not make the receiver
// forget what it was told before.
func TestPromiseIsKept(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		if r.Number <= 3 {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	d := to("")
	d.Retry.Schedule = []time.Duration{time.Hour}
	d.Retry.NotAfter = 500 * time.Hour
	d.Breaker = policy.BreakerPolicy{ProbeAfter: 5 * time.Millisecond, ProbeMax: 20 * time.Millisecond}
	before := relaytest.Row[time.Time](db, `SELECT now()`)
	db.Insert(1, "key")
	for attempt := 1; attempt <= 5; attempt++ {
		if d.URL = rc.URL; attempt == 3 {
			d.URL = testkit.NewVacant(t).URL
		}
		r := start(t, config(db, d))
		r.await(t, "a settle", func(o *observer) bool {
			return o.outcomes[policy.Retry]+o.outcomes[policy.Delivered]+o.outcomes[policy.Hold] > 0
		})
		r.stop()
		want := promises(rc)[0]
		if attempt == 5 {
			want = "" // what was accepted is not sent again
		}
		if got := relaytest.Row[string](db, stored); got != want {
			t.Errorf("after attempt %d %q is stored, want %q", attempt, got, want)
		}
		db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now()`)
	}
	said := promises(rc)
	testkit.Equal(t, "requests", len(said), 4)
	for i, promise := range said {
		if promise != said[0] {
			t.Errorf("request %d of %d says %s, the first %s", i+1, len(said), promise, said[0])
		}
	}
	first, err := time.Parse(post.TimeFormat, said[0])
	relaytest.Must(t, err)
	if earliest := before.Add(d.Retry.NotAfter); first.Before(earliest) || first.After(relaytest.Row[time.Time](db, `SELECT now()`).Add(d.Retry.NotAfter)) {
		t.Errorf("the promise is %s, of a delivery that could be claimed from %s on", first, before)
	}
}

// What is pending when its promise ends, or so shortly before that a request could outlast it, is
// never sent. It fails with an alert that says what to do, and a replay makes its own promise.
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
			db := relaytest.Covered(t)
			rc := relaytest.NewReceiver(t, nil)
			db.Insert(1, "key")
			db.Exec(`UPDATE outbox_delivery SET attempts = 3, last_attempt_at = now(), not_after = now() + $1::interval`, c.left)
			promise := relaytest.Row[string](db, stored)
			r := start(t, config(db, to(rc.URL)))
			if c.sent {
				r.settles(t, policy.Delivered, 1)
				if got := promises(rc); got[0] != promise {
					t.Errorf("the request says %q, want %q", got, promise)
				}
				return
			}
			r.settles(t, policy.Fail, 1)
			if got := relaytest.Row[string](db, `SELECT concat_ws(' ', status, attempts, last_reason) FROM outbox_delivery`); got != "failed 3 not_after_passed" || rc.Total() != 0 {
				t.Errorf("%s after %d requests", got, rc.Total())
			}
			text := relaytest.Row[string](db, `SELECT last_error FROM outbox_delivery`)
			testkit.Contains(t, "found", text, promise[:len("2006-01-02T15:04:05")]+"Z", "outbox-relay replay "+fmt.Sprint(relaytest.Row[int64](db, `SELECT event_id FROM outbox_delivery`)))
			testkit.Equal(t, "the alert", relaytest.Row[string](db, `SELECT first_error FROM outbox_alert WHERE rule = 'failed'`), text)

			done, err := ops.New(db.Pool).Replay(t.Context(), ops.Selection{Reason: string(policy.ReasonNotAfter)}, 0, nil)
			relaytest.Must(t, err)
			if done.Done != 1 {
				t.Errorf("replayed %+v", done)
			}
			r.settles(t, policy.Delivered, 1)
			if got := rc.All()[0].Header; got.Get(webhook.Replay) != "true" || got.Get(webhook.NotAfter) <= promise {
				t.Errorf("the replay's headers are %v", got)
			}
		})
	}
}

// An outage of 63 days, twice as long as what is promised. What never had a connection is promised
// nothing, and all of it is delivered, as is what was not tried until late; what its receiver may
// have seen is not sent when that can have forgotten it.
func TestOutageBeyondThePromise(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const waiting, weeks, week = 60, 9, 7 * 24 * time.Hour
	for name, answering := range map[string]bool{"connections are refused": false, "every answer is a 500": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			rc := relaytest.NewReceiver(t, nil)
			g := newSwitch(t, rc, answering)
			d := post.Destination{Name: "default", URL: g.url, MaxInFlight: 4}
			d.Breaker = policy.BreakerPolicy{ProbeAfter: 5 * time.Millisecond, ProbeMax: 20 * time.Millisecond}
			db.Insert(waiting, "waiting")
			db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '60 days' WHERE event_id > 50`) // tried late
			r := start(t, config(db, d))
			relaytest.Becomes(db, "open", `SELECT coalesce((SELECT breaker FROM outbox_destination), '')`)
			for range weeks {
				before := sees(r.observer, func(o *observer) int { return len(o.attempts) })
				letPass(db, week)
				db.Exec(`UPDATE outbox_delivery SET not_after = not_after - $1::interval WHERE claimed_by IS NULL`, week)
				r.await(t, "a probe", func(o *observer) bool { return len(o.attempts) > before || o.outcomes[policy.Fail] > 0 })
			}
			failed := sees(r.observer, func(o *observer) int { return o.outcomes[policy.Fail] })
			if !answering && failed > 0 {
				t.Errorf("%d have failed, which no receiver has seen", failed)
			}
			g.up()
			relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`)
			relaytest.Becomes(db, "closed", `SELECT breaker FROM outbox_destination`)
			wrong := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'failed' AND last_reason <> 'not_after_passed'
				OR status = 'failed' AND NOT $1 OR status = 'failed' AND event_id > 50`, answering)
			if delivered := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`); wrong > 0 || answering == (delivered == waiting) {
				t.Errorf("%d of %d delivered, %d failed that should not", delivered, waiting, wrong)
			}
		})
	}
}

// A stop gives back what was not sent, and what no connection was found for, as if it had never
// been claimed.
func TestOnlyWhatWasSentIsBound(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "default", "vacant")
	g, rc := relaytest.NewGated(t)
	d := to(rc.URL)
	d.MaxInFlight = 2
	vacant := post.Destination{Name: "vacant", URL: testkit.NewVacant(t).URL, MaxInFlight: 1, Breaker: policy.BreakerPolicy{Disabled: true}}
	vacant.Retry.Schedule = []time.Duration{time.Hour}
	db.Insert(5, "key")
	r := start(t, config(db, d, vacant))
	<-g.Arrived
	<-g.Arrived
	r.await(t, "claims ahead", func(o *observer) bool { return o.outcomes[policy.Retry] == 5 })
	relaytest.Becomes(db, 4, `SELECT count(*) FROM outbox_delivery WHERE destination = 'default' AND not_after IS NOT NULL`)
	r.Abort()
	r.cancel()
	r.stop()
	for destination, want := range map[string]int{"default": 2, "vacant": 0} {
		if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE destination = $1 AND not_after IS NOT NULL AND status = 'pending'`, destination); n != want {
			t.Errorf("%d deliveries to %s are bound by a promise, want %d", n, destination, want)
		}
	}
}

// A switch stands before a receiver that is away at first: connections are refused there or, if
// answering, every answer is a 500.
type frontSwitch struct {
	url string
	up  func()
}

func newSwitch(t *testing.T, rc *relaytest.Receiver, answering bool) *frontSwitch {
	t.Helper()
	if !answering {
		front := testkit.NewVacant(t)
		return &frontSwitch{url: front.URL, up: func() { front.Open(t, rc.Config.Handler) }}
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
