package ops_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/relay/archive"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

// An event is found by what people know of it: id, key, reference; also when it is archived.
func TestFindEvents(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	db.InsertOld(1, "old")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, related_reference) SELECT 't', '{"a":1}', 'k' || i, 'ref' || i % 2 FROM generate_series(1, 5) i`)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', '3'), ('t', '{}', '4711')`)
	outbox := ops.New(db.Pool)
	_, err := outbox.Archive(t.Context(), archive.Retention{ArchiveAfter: 30 * 24 * time.Hour, DeleteAfter: 400 * 24 * time.Hour, Attempts: 90 * 24 * time.Hour}, nil)
	relaytest.Must(t, err)
	if n := relaytest.Row[int](db, `SELECT count(*)::int FROM outbox_archive`); n != 1 {
		t.Fatalf("%d events are archived", n)
	}
	for text, want := range map[string][]int64{
		"2": {2}, "k4": {5}, "ref1": {6, 4, 2}, "3": {3}, "4711": {8}, "old-1": {1}, "1": {1},
	} {
		ids, err := outbox.FindEvents(t.Context(), text)
		relaytest.Must(t, err)
		if !slices.Equal(ids, want) {
			t.Errorf("%s: %d, want %d", text, ids, want)
		}
	}
	for _, text := range []string{"", "0", "-1", "99", "k", "ref"} {
		if _, err := outbox.FindEvents(t.Context(), text); !errors.Is(err, ops.ErrUnknownEvent) {
			t.Errorf("%q: %v", text, err)
		}
	}
	old, err := outbox.Event(t.Context(), 1, true)
	relaytest.Must(t, err)
	if old.Event.ArchivedAt == nil || old.Event.Payload == nil || len(old.Deliveries) != 1 || old.Deliveries[0].Status != "delivered" || old.Deliveries[0].DeliveredAt == nil || *old.Deliveries[0].LatencySeconds < 4*86400 {
		t.Errorf("%+v", old)
	}
	recent, err := outbox.Event(t.Context(), 2, false)
	relaytest.Must(t, err)
	if recent.Event.Payload != nil || recent.Event.PayloadBytes != 7 || *recent.Event.RelatedReference != "ref1" {
		t.Errorf("%+v", recent.Event)
	}
	if history := old.Explain().History; len(history) != 3 || history[1].What != "delivered" || history[2].What != "archived" {
		t.Errorf("%+v", history)
	}
}
