package watch

import (
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A search looks at a bounded number of events, the new ones first, continues where any relay has
// stopped, and comes by all of them again and again.
func TestSearchOfUndeliveredGoesOn(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	relays := []*Watcher{{DB: db.Pool}, {DB: db.Pool}}
	db.Insert(30, "old")
	old := db.Load(2, "lost")
	db.Insert(30, "newer")
	recent := db.Load(1, "fresh")
	db.Insert(5, "newest")
	search := func(i int) []int64 {
		t.Helper()
		_, err := relays[i%2].searchNext(t.Context(), 0, 10)
		relaytest.Must(t, err)
		return relaytest.Rows[int64](db, `SELECT unnest(missing) FROM outbox_undelivered`)
	}
	if got := search(0); !slices.Equal(got, recent) {
		t.Errorf("the first search found %d, want the newest, %d", got, recent)
	}
	i := 1
	for ; len(search(i)) < 3; i++ {
		if i > 7 {
			t.Fatal("the walk through all events does not continue")
		}
	}
	if got, want := search(i), slices.Concat(old, recent); !slices.Equal(got, want) {
		t.Errorf("found %d, want %d", got, want)
	}

	db.Exec(`DELETE FROM outbox WHERE id = $1`, old[0]) // of an operator
	db.Exec(`INSERT INTO outbox_delivery (event_id, destination) VALUES ($1, 'default')`, old[1])
	if got := search(i); !slices.Equal(got, recent) {
		t.Errorf("still found: %d, want %d", got, recent)
	}
	many := db.Load(MaxUndelivered+50, "many")
	for range 1 + len(many)/10 {
		search(0)
	}
	got := relaytest.Rows[int](db, `SELECT cardinality(missing) FROM outbox_undelivered`)
	text := (&UndeliveredSample{Count: got[0], Event: recent[0]}).String()
	if got[0] != MaxUndelivered+1 || !strings.HasPrefix(text, "more than 1000 events have no delivery") {
		t.Errorf("%d remembered: %s", got, text)
	}
}

// An event that no relay has taken, or that is in a relay's hand, is not without deliveries yet;
// one that was loaded is, beside them.
func TestSearchLeavesUnroutedEvents(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	db.Serve("default")
	w := &Watcher{DB: enginePool(t, db.DSN)}
	want := func(what string, ids ...int64) {
		t.Helper()
		_, err := w.searchNext(t.Context(), 0, 100)
		relaytest.Must(t, err)
		if got := relaytest.Rows[int64](db, `SELECT unnest(missing) FROM outbox_undelivered`); !slices.Equal(got, ids) {
			t.Errorf("%s: found %d, want %d", what, got, ids)
		}
	}
	db.Insert(3, "e")
	lost := db.Load(1, "lost")
	want("not taken", lost...)
	r, err := intake.TakeRange(t.Context(), w.DB, 1, intake.Terms{Events: 10}, false)
	relaytest.Must(t, err)
	want("in hand", lost...)
	s := intake.NewRows{Relay: 1, Ranges: []intake.RangeRef{r.Ref()}, Ended: []intake.RangeRef{r.Ref()}}
	for _, e := range r.Events[1:] {
		s.Deliveries = append(s.Deliveries, intake.NewRow{Range: r.Ref(), EventID: e.ID, Destination: "default", Status: intake.Pending})
	}
	_, err = intake.SettleRanges(t.Context(), w.DB, s)
	relaytest.Must(t, err)
	want("ended, with a delivery that was lost", append([]int64{r.Events[0].ID}, lost...)...)
}
