package relay

import (
	"fmt"
	"hash/fnv"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A receiver refuses 6 % of all requests with 429, asks to come back in two seconds, and fails 4 %
// with 503, for as long as events come. Each key's events arrive once and in order, each key waits
// for its own refusals alone, and the lane is neither closed nor slowed: no backlog is left.
func TestOrderHoldsUnderSustainedRefusals(t *testing.T) {
	t.Parallel()
	const keys = 40
	rounds := testsize.Of(12, 4)
	var mu sync.Mutex
	accepted := map[string][]string{} // numbers by ordering key
	refused := map[int]int{}          // requests by status
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, r relaytest.Request) {
		hash := fnv.New32a()
		fmt.Fprint(hash, r.Number, "/", r.Key)
		status := http.StatusNoContent
		switch chance := hash.Sum32() >> 8 % 100; {
		case chance < 6:
			status = http.StatusTooManyRequests
			w.Header().Set("Retry-After", "2")
		case chance < 10:
			status = http.StatusServiceUnavailable
		}
		mu.Lock()
		defer mu.Unlock()
		if key, number, _ := strings.Cut(r.Key, "-"); status == http.StatusNoContent {
			accepted[key] = append(accepted[key], number)
		} else {
			refused[status]++
		}
		w.WriteHeader(status)
	})
	db := relaytest.Covered(t)
	d := to(rc.URL)
	d.Retry.Schedule, d.Retry.MaxAttempts = []time.Duration{50 * time.Millisecond}, 20
	r := start(t, config(db, d))
	db.Insert(1, "first") // a refusal that is the first answer of all is a stop
	r.settles(t, policy.Delivered, 1)
	for round := range rounds {
		for key := range keys {
			db.InsertKeyed(fmt.Sprint("k", key), 5*round+1, 5*round+5)
		}
	}
	r.settles(t, policy.Delivered, 1+5*keys*rounds)
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status <> 'delivered'`); n > 0 {
		t.Errorf("%d deliveries are left", n)
	}
	l := r.lane("default")
	if until := l.EarliestClaim(time.Now(), DefaultLease); l.State().RateLimit != 0 || !until.IsZero() {
		t.Errorf("paced to %g a second, closed until %s", l.State().RateLimit, until)
	}
	mu.Lock()
	defer mu.Unlock()
	for key := range keys {
		name := fmt.Sprint("k", key)
		if got := strings.Join(accepted[name], " "); got != numbers(1, 5*rounds) {
			t.Errorf("of %s were accepted %s", name, got)
		}
	}
	if refused[http.StatusTooManyRequests] < 3*keys*rounds/20 || refused[http.StatusServiceUnavailable] == 0 {
		t.Errorf("refused: %v", refused)
	}
}

// A destination that asks to wait is neither down nor failing: its row says until when.
func TestAskedToWaitIsShown(t *testing.T) {
	t.Parallel()
	rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, _ relaytest.Request) {
		w.Header().Set("Retry-After", "40")
		w.WriteHeader(http.StatusTooManyRequests)
	})
	db := relaytest.Covered(t)
	d := to(rc.URL)
	d.Retry.RetryAfterMax = time.Hour
	start(t, config(db, d))
	db.Insert(1, "refused")
	relaytest.Eventually(t, "the wait is recorded", func() bool {
		return relaytest.Row[bool](db, `SELECT coalesce(max(wait_until) BETWEEN now() + interval '20 seconds' AND now() + interval '41 seconds', false) FROM outbox_relay_destination`)
	})
	s, err := ops.New(db.Pool).Status(t.Context(), "")
	relaytest.Must(t, err)
	if got := s.Destinations[0]; got.State != "slowed" || got.WaitUntil == nil {
		t.Errorf("%+v", got)
	}
	if len(s.Advice) != 1 || s.Advice[0].Rule != "slowed" || len(s.Advice[0].Commands) != 1 {
		t.Errorf("%+v", s.Advice)
	}
}

// A relay that was asked to wait holds nothing meanwhile: another one, or an operator who ends the
// wait, gets what is due delivered.
func TestAskedToWaitHoldsNothing(t *testing.T) {
	t.Parallel()
	for name, send := range map[string]func(t *testing.T, db *relaytest.Database, r *running, d post.Destination) *running{
		"another relay": func(t *testing.T, db *relaytest.Database, _ *running, d post.Destination) *running {
			return start(t, config(db, d))
		},
		"an operator": func(t *testing.T, db *relaytest.Database, r *running, _ post.Destination) *running {
			p, err := ops.New(db.Pool).Resume(t.Context(), "default", true)
			if err != nil || !p.WaitEnded || p.BreakerReset {
				t.Errorf("%+v, %v", p, err)
			}
			return r
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var works atomic.Bool
			rc := relaytest.NewReceiver(t, func(w http.ResponseWriter, _ relaytest.Request) {
				if !works.Load() {
					w.Header().Set("Retry-After", "50")
					w.WriteHeader(http.StatusServiceUnavailable)
				}
			})
			db := relaytest.Covered(t)
			d := to(rc.URL)
			d.Retry.RetryAfterMax = time.Hour
			r := start(t, config(db, d))
			db.Insert(1, "refused")
			relaytest.Becomes(db, true, `SELECT coalesce(max(wait_until) > now() + interval '20 seconds', false) FROM outbox_relay_destination`)
			works.Store(true)
			db.InsertKeyed("k", 1, 3)
			db.Insert(2, "free")
			relaytest.Becomes(db, 6, `SELECT count(*) FROM outbox_delivery d WHERE status = 'pending' AND `+pg.IsFree)
			testkit.Equal(t, "requests while it waits", rc.Total(), 1)
			send(t, db, r, d).settles(t, policy.Delivered, 5)
			testkit.Equal(t, "of the key", rc.Numbers("k"), numbers(1, 3))
		})
	}
}
