package ops_test

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A pause keeps its reason until it has another, and only destinations that are known can be
// paused.
func TestPauseAndResume(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	outbox := ops.New(db.Pool)
	for _, test := range []struct {
		reason string
		want   ops.Pause
	}{
		{"maintenance", ops.Pause{Destination: "default", Paused: true, Changed: true, Reason: "maintenance", Breaker: "closed"}},
		{"", ops.Pause{Destination: "default", Paused: true, Reason: "maintenance", Breaker: "closed"}},
		{"longer maintenance", ops.Pause{Destination: "default", Paused: true, Reason: "longer maintenance", ReasonChanged: true, Breaker: "closed"}},
		{"longer maintenance", ops.Pause{Destination: "default", Paused: true, Reason: "longer maintenance", Breaker: "closed"}},
	} {
		if got, err := outbox.Pause(t.Context(), "default", test.reason); err != nil || got != test.want {
			t.Errorf("got %+v, %v, want %+v", got, err, test.want)
		}
	}
	testkit.Equal(t, "the audit has", relaytest.Rows[string](db, `SELECT detail FROM outbox_audit WHERE action = 'pause' ORDER BY id`), []string{"maintenance", "longer maintenance"})
	if got, err := outbox.Resume(t.Context(), "default", false); err != nil || !got.Changed || got.Paused {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := outbox.Resume(t.Context(), "default", true); err != nil || got.Changed || got.BreakerReset {
		t.Errorf("a second time: %+v, %v", got, err)
	}
	for _, change := range []func() (ops.Pause, error){
		func() (ops.Pause, error) { return outbox.Pause(t.Context(), "defualt", "") },
		func() (ops.Pause, error) { return outbox.Resume(t.Context(), "", true) },
	} {
		if _, err := change(); !errors.Is(err, ops.ErrUnknownDestination) {
			t.Error(err)
		}
	}
	testkit.Equal(t, "destinations have state", relaytest.Row[int](db, `SELECT count(*) FROM outbox_destination`), 1)
}

// A tail reports what is inserted, attempted and delivered after it began, once; also the
// deliveries that come to be when their outcome is known.
func TestTail(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "default", "second")
	db.Insert(1, "before")
	outbox := ops.New(db.Pool)
	tail, err := outbox.Tail(t.Context(), ops.TailFilter{})
	relaytest.Must(t, err)
	want := func(what string, want ...string) {
		t.Helper()
		moments, err := tail.Look(t.Context())
		relaytest.Must(t, err)
		var got []string
		for _, m := range moments {
			got = append(got, strings.TrimSpace(m.Destination+" "+regexp.MustCompile(`, \S+ after it was due$`).ReplaceAllString(m.Text, "")))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	want("nothing new")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('paid', '{}', 'k')`)
	want("inserted", "event 2: inserted, paid, key k")
	want("nothing since")
	r, err := intake.TakeRange(t.Context(), db.Pool, 1, intake.Terms{Events: 10}, false)
	relaytest.Must(t, err)
	settle := func(ended bool, destination string, status intake.Status) {
		t.Helper()
		s := intake.NewRows{
			Relay: 1, Ranges: []intake.RangeRef{r.Ref()},
			Deliveries: []intake.NewRow{{Range: r.Ref(), EventID: 2, Destination: destination, Status: status}},
		}
		if ended {
			s.Ended = s.Ranges
		}
		_, err := intake.SettleRanges(t.Context(), db.Pool, s)
		relaytest.Must(t, err)
	}
	settle(false, "second", intake.Delivered)
	want("one is delivered, the other in hand", "second event 2: delivered")
	want("nothing since")
	settle(true, "default", intake.Pending)
	want("the other waits")
	db.Exec(`UPDATE outbox_delivery SET status = 'failed' WHERE destination = 'default'`)
	want("the other has failed", "default event 2: failed")
	db.Exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE destination = 'default'`)
	want("the tail follows it no more")
}
