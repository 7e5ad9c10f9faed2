package compare_test

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/reconcile/compare"
)

// What was received before Since takes no place of what is named, and makes no report incomplete.
func TestUnfinishedBeforeSinceTakesNoPlace(t *testing.T) {
	t.Parallel()
	s := newSides(t, 100) // an hour ago but for their numbers in seconds
	s.there(`UPDATE processed_events SET processing_state = 'recorded' WHERE idempotency_key = ANY ($1)`, keys(1, 2, 3, 90))
	s.there(`INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state, inbox_id, received_at, next_attempt_at)
		SELECT receiver, source, idempotency_key, (ARRAY['failed', 'processing', 'pending'])[1 + n % 3], n, received_at, CASE WHEN n % 2 = 0 THEN now() END
		FROM (SELECT *, row_number() OVER () AS n FROM processed_events WHERE processing_state = 'recorded') p`)
	since := pgtest.Row[time.Time](t, s.inbox, `SELECT received_at - interval '30 s' FROM processed_events WHERE idempotency_key = $1`, key(90))
	r := s.run(func(o *compare.Options) { o.Since, o.Limit = since, 2 })
	s.want(r, "no effect", r.NoEffect, keys(90))
	if !r.Complete {
		t.Errorf("report %+v", r)
	}
}

// A table of effects may have those of other senders, and of long ago. A run names neither.
func TestDoubledOfThisSenderSinceThen(t *testing.T) {
	t.Parallel()
	s := newSides(t, 100) // an hour ago but for their numbers in seconds
	s.there(`INSERT INTO effect SELECT unnest($1::text[])`, keys(1, 2, 90))
	s.there(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at)
		SELECT r, s, k, 'succeeded', now() - interval '10 min' FROM (VALUES ('shop', 'shipping', 'a'), ('other', 'billing', 'b'), ('shop', 'billing', 'stranger')) v (r, s, k)`)
	s.there(`INSERT INTO effect SELECT k FROM unnest(ARRAY['a', 'b', 'c', 'stranger']) k, generate_series(1, 2)`)
	r := s.run()
	s.want(r, "effect twice", r.Doubled, keys(1, 2, 90))
	s.want(r, "effect without event", r.Strangers, []string{"stranger"})
	since := pgtest.Row[time.Time](t, s.inbox, `SELECT received_at - interval '30 s' FROM processed_events WHERE idempotency_key = $1`, key(90))
	r = s.run(func(o *compare.Options) { o.Since, o.Limit = since, 3 })
	s.want(r, "effect twice", r.Doubled, keys(90))
	if !r.Complete {
		t.Errorf("report %+v", r)
	}
}
