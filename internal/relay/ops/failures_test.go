package ops

import (
	"fmt"
	"slices"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

func TestFailures(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "default", "other")
	db.Insert(6, "k")
	db.Settled("failed", "event_id < 4")
	db.Exec(`UPDATE outbox_delivery SET last_reason = 'timeout', attempts = 2, last_error = 'slow', last_attempt_at = now() WHERE event_id IN (3, 5)`)
	groups, err := New(db.Pool).Failures(t.Context(), "default")
	relaytest.Must(t, err)
	var got []string
	for _, g := range groups {
		got = append(got, fmt.Sprint(g.Status, " ", g.Reason, " ", g.Count, " ", g.LastEventID, " ", g.LastError))
	}
	want := []string{"failed server_error 2 2 attempt 8 of 8: 500", "failed timeout 1 3 slow", "pending timeout 1 5 slow"}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if none, err := New(db.Pool).Failures(t.Context(), "nowhere"); err != nil || len(none) != 0 {
		t.Errorf("%v, %v", none, err)
	}
}

// Page by page, everything comes once.
func TestDeliveriesByPage(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "default", "other", "third")
	db.Insert(7, "k")
	var got []string
	filter := DeliveryFilter{Limit: 4}
	for {
		list, err := New(db.Pool).Deliveries(t.Context(), filter)
		relaytest.Must(t, err)
		for _, d := range list.Deliveries {
			got = append(got, fmt.Sprint(d.EventID, d.Destination))
		}
		if list.Next == nil {
			break
		}
		filter.After = *list.Next
	}
	want := relaytest.Rows[string](db, `SELECT event_id || destination FROM outbox_delivery ORDER BY event_id DESC, destination`)
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	list, err := New(db.Pool).Deliveries(t.Context(), DeliveryFilter{Key: "k-3", Limit: 2})
	relaytest.Must(t, err)
	rest, err := New(db.Pool).Deliveries(t.Context(), DeliveryFilter{Key: "k-3", Limit: 2, After: *list.Next})
	relaytest.Must(t, err)
	if len(list.Deliveries) != 2 || list.Deliveries[0].IdempotencyKey != "k-3" || len(rest.Deliveries) != 1 || rest.Deliveries[0].Destination != "third" || rest.Next != nil {
		t.Errorf("%+v, %+v", list, rest)
	}
}
