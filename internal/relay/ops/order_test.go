package ops

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// What an interrupted discard finds later was not ordered: neither on the original of a copy, nor
// where events came meanwhile.
func TestInterruptedDiscardEndsWithItsOrder(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	outbox := New(db.Pool)
	_, err := outbox.AcceptIdentity(t.Context(), "")
	relaytest.Must(t, err)
	db.Insert(1500, "original")
	db.Exec(`UPDATE outbox_identity SET database_oid = 1`)
	ctx, interrupt := context.WithCancel(t.Context())
	if b, err := outbox.DiscardQuarantined(ctx, "", func(Bulk) { interrupt() }); err == nil || b.Done != 1000 {
		t.Errorf("%+v, %v", b, err)
	}
	entry, err := outbox.AuditEntry(t.Context(), 2)
	relaytest.Must(t, err)
	if entry.State != "interrupted" || entry.Done != 1000 || entry.Resumable() {
		t.Errorf("it would discard everything: %+v", entry)
	}

	db.Exec(`DELETE FROM outbox_delivery; DELETE FROM outbox`)
	db.Insert(1500, "k")
	enough := errors.New("enough")
	ctx, stop := context.WithCancelCause(t.Context())
	if b, err := outbox.Discard(ctx, Selection{Destination: "default"}, func(Bulk) { stop(enough) }); !errors.Is(err, enough) || b.Done != 1000 {
		t.Errorf("%+v, %v", b, err)
	}
	db.Insert(5, "later")
	order, err := outbox.TakeUp(t.Context(), 3)
	relaytest.Must(t, err)
	if b, err := outbox.Work(t.Context(), 3, order, nil); err != nil || b.Done != 500 {
		t.Errorf("%+v, %v", b, err)
	}
	testkit.Equal(t, "what came later", relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'pending'`), 5)
}

// A replay sends nothing again that was delivered for the first time after its order.
func TestReplayLeavesWhatIsDeliveredMeanwhile(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(40, "k")
	const deliver = `UPDATE outbox_delivery SET status = 'delivered', delivered_at = clock_timestamp(), attempts = 1, last_attempt_at = now() - interval '1 second' WHERE event_id %s`
	db.Exec(fmt.Sprintf(deliver, "<= 30"))
	meanwhile := true
	b, err := New(db.Pool).Replay(t.Context(), Selection{Statuses: []string{"delivered"}, Rate: new(int64(50))}, 0, func(Bulk) {
		if meanwhile {
			db.Exec(fmt.Sprintf(deliver, "> 30"))
		}
		meanwhile = false
	})
	if err != nil || b.Done != 30 {
		t.Errorf("%+v, %v", b, err)
	}
}

// An order changes what its preview has counted, and the audit has the count.
func TestOrderIsWhatItsPreviewFound(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(12, "k")
	db.Settled("failed", "event_id >= 10")
	outbox := New(db.Pool)
	for _, action := range []string{"replay", "discard"} {
		order, found, err := outbox.Preview(t.Context(), Order{Action: action, Selection: Selection{Destination: "default", Statuses: []string{"failed"}}})
		relaytest.Must(t, err)
		testkit.Equal(t, action, found.Matched, 3)
		db.Exec(`UPDATE outbox_delivery SET status = 'failed', last_attempt_at = clock_timestamp() WHERE event_id IN (3, 5)`)
		db.Insert(20, "later "+action)
		db.Settled("failed", "event_id > 12")
		b, err := outbox.Do(t.Context(), order, nil)
		if err != nil || b.Done != 3 {
			t.Errorf("%s: %+v, %v", action, b, err)
		}
		if changed := relaytest.Rows[int64](db, `SELECT event_id FROM outbox_delivery WHERE status <> 'failed' AND event_id >= 10 ORDER BY 1`); !slices.Equal(changed, []int64{10, 11, 12}) {
			t.Errorf("%s changed %v", action, changed)
		}
		testkit.Equal(t, action, relaytest.Row[string](db, `SELECT matched || ' ' || done FROM outbox_audit ORDER BY id DESC LIMIT 1`), "3 3")
		db.Settled("failed", "event_id >= 10 AND event_id <= 12")
		db.Exec(`DELETE FROM outbox_delivery WHERE event_id > 12; UPDATE outbox_delivery SET status = 'pending', last_attempt_at = NULL WHERE event_id < 10`)
	}
}
