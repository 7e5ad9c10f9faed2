package relay

import (
	"io"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A slowStart counts the requests to a recovering receiver that a slow start would not have sent
// yet.
type slowStart struct {
	mu                         sync.Mutex
	inFlight, answered, excess int
}

func (s *slowStart) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	s.mu.Lock()
	s.inFlight++
	allowed := 1 // after so many answers: a power of two
	for s.answered >= 2*allowed-1 {
		allowed *= 2
	}
	if s.inFlight > allowed {
		s.excess++
	}
	s.mu.Unlock()
	<-time.After(time.Millisecond) // so that what is in flight at once is seen at once
	s.mu.Lock()                    // the relay must not see an answer before it is counted
	s.inFlight--
	s.answered++
	s.mu.Unlock()
	w.WriteHeader(http.StatusNoContent)
}

// A destination that is down spends no attempt of what waits for it, does not hold up the others,
// is alerted once, and recovers slowly.
func TestDeadDestination(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const due = 2000
	db := relaytest.Covered(t, "living", "dead")
	address := testkit.NewVacant(t)
	dead := post.Destination{Name: "dead", URL: address.URL, Breaker: policy.BreakerPolicy{ProbeMax: 2 * time.Second}}
	cfg := config(db, named("living", to(relaytest.NewReceiver(t, nil).URL)), dead)
	cfg.Alerts = alert.Config{Channels: []alert.Channel{alert.Webhook(relaytest.NewReceiver(t, nil).URL, direct)}, After: 1}
	r := start(t, cfg)
	db.Insert(due, "key")
	const open = `SELECT coalesce((SELECT breaker FROM outbox_destination WHERE destination = 'dead'), '')`
	relaytest.Becomes(db, "open", open)
	r.settles(t, policy.Delivered, due)
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE destination = 'dead' AND (attempts > 0 OR status <> 'pending')`); n > policy.DefaultBreakerFailures {
		t.Errorf("%d of %d have spent attempts", n, due)
	}
	r.await(t, "the alert", func(o *observer) bool { return len(o.told(alert.RuleBreakerOpen)) == 1 })

	recovered := &slowStart{}
	address.Open(t, recovered)
	tried := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE destination = 'dead' AND attempts > 0`)
	relaytest.Becomes(db, due-tried, `SELECT count(*) FROM outbox_delivery WHERE destination = 'dead' AND status = 'delivered' AND attempts = 1`)
	r.await(t, "the recovery", func(o *observer) bool { return slices.Contains(o.told(alert.RuleBreakerOpen), "resolved") })
	testkit.Equal(t, "told", sees(r.observer, func(o *observer) []string { return o.told(alert.RuleBreakerOpen) }), []string{"firing", "resolved"})
	recovered.mu.Lock()
	defer recovered.mu.Unlock()
	testkit.Equal(t, "requests beyond slow start", recovered.excess, 0)
}
