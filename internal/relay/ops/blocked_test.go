package ops_test

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// Status counts the ordering keys that are blocked as relays do: not where a failed delivery blocks
// nothing, by the configuration of the relay that looked last.
func TestBlockedKeysAreThoseOfRelays(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "a", "b")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) SELECT 't', '{}', i, 'key-' || i % 2 FROM generate_series(1, 6) i`)
	db.Settled("failed", "event_id < 3")
	lenient := []string{}
	w := &watch.Watcher{
		DB: db.Pool, Config: func() watch.Config { return watch.Config{Interval: 1}.WithDefaults() }, Looked: func() {}, Due: func() {},
		Alerts: func() alert.Config { return alert.Config{}.WithDefaults() }, Lenient: func() []string { return lenient },
	}
	want := func(what string, a, b int64) {
		t.Helper()
		s, err := ops.New(db.Pool).Status(t.Context(), "")
		relaytest.Must(t, err)
		if s.Destinations[0].BlockedKeys != a || s.Destinations[1].BlockedKeys != b {
			t.Errorf("%s: %d and %d", what, s.Destinations[0].BlockedKeys, s.Destinations[1].BlockedKeys)
		}
		counted, err := w.CountBacklog(t.Context(), []string{"a", "b"}, 100)
		relaytest.Must(t, err)
		if counted.Lanes[0].BlockedKeys != int(a) || counted.Lanes[1].BlockedKeys != int(b) {
			t.Errorf("%s: relays count %+v", what, counted.Lanes)
		}
	}
	want("before the first look", 2, 2)
	relaytest.Must(t, w.Look(t.Context()))
	want("all block", 2, 2)
	lenient = []string{"b"}
	relaytest.Must(t, w.Look(t.Context()))
	want("one skips", 2, 0)
}
