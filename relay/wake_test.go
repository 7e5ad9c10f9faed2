package relay

import (
	"net/http"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/relay/policy"
)

func TestNotifyNeverLosesASweep(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		tokens []bool
		want   bool
	}{
		{"look", []bool{false}, false},
		{"sweep", []bool{true}, true},
		{"look, then sweep", []bool{false, true}, true},
		{"sweep, then look", []bool{true, false}, true},
		{"many", []bool{false, false, true, false, false}, true},
	} {
		w := newWakeup()
		for _, sweep := range c.tokens {
			w.notify(sweep)
		}
		if got := <-w.notified; got != c.want {
			t.Errorf("%s: %t", c.name, got)
		}
		select {
		case <-w.notified:
			t.Errorf("%s: more than one token", c.name)
		default:
		}
	}
}

// A relay that idles between polls looks when a retry is due.
func TestRetryWaitsForNoPoll(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(1, "key")
	rc := newReceiver(t, func(w http.ResponseWriter, r request) {
		if r.number == 1 {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	d := to(rc.URL)
	d.Retry.Schedule = []time.Duration{10 * time.Millisecond}
	r := sessionOf(t, db.config(d))
	r.taking, r.doing, r.settling = t.Context(), t.Context(), t.Context()
	turn := func(c *claimer) (wait time.Duration) {
		wait, err := c.claimIfDue(t.Context())
		must(t, err)
		r.senders.wait()
		return wait
	}
	first := r.newClaimer()
	first.pace = policy.Pace{Poll: time.Hour}
	turn(first)
	r.settler.write(batch{settlements: []settlement{<-r.settler.settlements}})

	far := time.Now().Add(time.Hour)
	idle := r.newClaimer()
	idle.writers.Next, idle.pace = far, policy.Pace{Poll: time.Second, Idle: true, Interval: time.Hour, NextLook: far}
	eventually(t, "the retry", func() bool {
		wait := turn(idle)
		return rc.total() == 2 || wait < 0 || wait > time.Second
	})
	if rc.total() != 2 {
		t.Error("the relay idles, and nothing will wake it when the retry is due")
	}
}
