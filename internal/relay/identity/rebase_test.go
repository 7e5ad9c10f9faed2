package identity_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Where the transaction ids are another server's, accepting makes each event pending that may not
// be settled, and relays take what comes afterwards.
func TestAcceptForeignIDs(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	_, err := identity.Accept(t.Context(), db.Pool, poolAddress(db.Pool), "", nil)
	relaytest.Must(t, err)
	const settled, waiting = 5_001, 5_000
	db.Insert(settled, "settled")
	take := func() intake.Range {
		t.Helper()
		r, err := intake.TakeRange(t.Context(), db.Pool, 1, intake.Terms{Events: settled}, false)
		relaytest.Must(t, err)
		return r
	}
	s := intake.NewRows{Relay: 1}
	r := take()
	s.Ranges, s.Ended = []intake.RangeRef{r.Ref()}, []intake.RangeRef{r.Ref()}
	for _, e := range r.Events {
		s.Deliveries = append(s.Deliveries, intake.NewRow{Range: r.Ref(), EventID: e.ID, Destination: "default", Status: intake.Delivered})
	}
	_, err = intake.SettleRanges(t.Context(), db.Pool, s)
	relaytest.Must(t, err)
	db.Insert(waiting, "waiting")
	report := func() identity.Report {
		t.Helper()
		report, err := identity.Compare(t.Context(), db.Pool, poolAddress(db.Pool), "")
		relaytest.Must(t, err)
		return report
	}
	if r := report(); r.Foreign != "" || r.Reason() != "" || r.Discardable() == nil {
		t.Errorf("on its server: %+v", r)
	}

	db.Exec(`UPDATE outbox_intake SET timeline = timeline + 1`)
	if r := report(); r.Foreign != "" {
		t.Errorf("after a failover: %+v", r)
	}
	n, err := identity.Rebase(t.Context(), db.Pool, nil)
	if err != nil || n != 0 || intake.CheckOrigin(t.Context(), db.Pool) != nil {
		t.Errorf("after a failover: %d deliveries, %v", n, err)
	}

	const elsewhere = `UPDATE outbox_intake SET system_identifier = 1`
	db.Exec(elsewhere)
	if r := report(); !strings.HasPrefix(r.Foreign, "the transaction ids of the events are from another server: the system identifier is ") ||
		r.Reason() != r.Foreign || r.Discardable() != nil {
		t.Errorf("on another server: %+v", r)
	}
	var steps []int64
	n, err = identity.Rebase(t.Context(), db.Pool, func(events int64) { steps = append(steps, events) })
	if err != nil || n != waiting || !slices.Equal(steps, []int64{5_000, 10_000}) {
		t.Errorf("%d deliveries, in steps %v: %v", n, steps, err)
	}
	if r := report(); r.Foreign != "" || r.Reason() != "" {
		t.Errorf("after the rebase: %+v", r)
	}
	if r := take(); r.Found != intake.Nothing {
		t.Errorf("took %d events", len(r.Events))
	}
	db.Insert(1, "later")
	db.Exec(elsewhere)
	_, err = identity.Accept(t.Context(), db.Pool, poolAddress(db.Pool), "", nil)
	relaytest.Must(t, err)
	db.Insert(2, "new")
	if r := take(); len(r.Events) != 2 {
		t.Errorf("took %d events", len(r.Events))
	}
	testkit.Equal(t, "deliveries", relaytest.Rows[string](db, `SELECT concat(status, ' ', count(*)) FROM outbox_delivery GROUP BY status ORDER BY 1`), []string{"delivered 5001", "pending 5001"})
}
