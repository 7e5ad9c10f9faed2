package intake

import (
	"context"
	"crypto/rand"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

const coverAll = `SELECT outbox_cover_events(0, 1000, '3:3:')`

// What commits while a batch makes deliveries, with an id below the last one of the batch, is left
// to the next take: it is not marked as if it had deliveries.
func TestWhatCommitsMeanwhileIsNotCovered(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	holder := r.Hold("INSERT ON outbox_delivery", "true")
	late := r.Begin()
	_, err := late.Exec(t.Context(), insertOne, "late")
	relaytest.Must(t, err)
	r.Exec(insertOne, "covered")
	done := make(chan error, 1)
	go func() {
		_, err := r.Pool.Exec(t.Context(), coverAll)
		done <- err
	}()
	relaytest.Eventually(t, "the batch makes a delivery", func() bool {
		return relaytest.Row[bool](r.Database, `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)`)
	})
	relaytest.Must(t, late.Commit(context.WithoutCancel(t.Context())))
	relaytest.Must(t, holder.Commit(context.WithoutCancel(t.Context())))
	relaytest.Must(t, <-done)
	testkit.Equal(t, "marked", relaytest.Row[string](r.Database, `SELECT string_agg(idempotency_key, ' ') FROM outbox WHERE xid = '2'`), "covered")
	testkit.Equal(t, "with a delivery", relaytest.Row[string](r.Database, `SELECT string_agg(idempotency_key, ' ') FROM outbox JOIN outbox_delivery ON event_id = id`), "covered")
}

// Logical replication copies the events and not the sequence of their ids: the ids that follow are
// not those of copied events, which ON CONFLICT DO NOTHING would take for repeated keys.
func TestIDsFollowThoseOfCoveredEvents(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(`INSERT INTO outbox (id, event_type, payload, idempotency_key) OVERRIDING SYSTEM VALUE SELECT n, 't', '1', 'copied-' || n FROM generate_series(1, 5) n`)
	r.Exec(coverAll)
	r.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'new') ON CONFLICT DO NOTHING`)
	testkit.Equal(t, "events", relaytest.Row[int](r.Database, `SELECT count(*) FROM outbox`), 6)
	before := relaytest.Row[int64](r.Database, `SELECT last_value FROM outbox_id_seq`)
	r.Exec(coverAll)
	testkit.Equal(t, "a sequence that is ahead", relaytest.Row[int64](r.Database, `SELECT last_value FROM outbox_id_seq`), before)
}

// An ordering key that no index can hold does not keep an event from its deliveries, which fail by
// the rule that it breaks.
func TestLongOrderingKeysAreCovered(t *testing.T) {
	t.Parallel()
	var long strings.Builder // which does not compress
	for range 200 {
		long.WriteString(rand.Text())
	}
	for _, statement := range []string{coverAll, `SELECT outbox_create_deliveries(0, 1000)`} {
		r := newRoom(t)
		r.Exec(insertKeyed, "long", long.String())
		r.Exec(insertKeyed, "short", strings.Repeat("k", 255))
		if statement != coverAll {
			r.Exec(`UPDATE outbox SET xid = '2'`)
		}
		r.Exec(statement)
		testkit.Equal(t, statement, relaytest.Row[string](r.Database, `SELECT string_agg(coalesce(length(ordering_key)::text, '-'), ' ' ORDER BY event_id) FROM outbox_delivery`), "- 255")
	}
}
