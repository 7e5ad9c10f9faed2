package inboxops

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

const selectLatestID = `SELECT coalesce(max(inbox_id), 0) FROM inbox_events`

// latestID returns the largest inbox id.
func latestID(ctx context.Context, tx pgx.Tx) (id int64, err error) {
	return rows.Value[int64](ctx, tx, "find latest event", selectLatestID)
}

const selectIDsOfKey = `
SELECT inbox_id FROM inbox_events
WHERE idempotency_key = $1::text AND ($2::text = '' OR receiver = $2::text) AND ($3::text = '' OR source = $3::text)
ORDER BY receiver, source LIMIT 10000`

// idsOfKey returns the inbox ids of the selection's idempotency key, one for each sender at most.
func idsOfKey(ctx context.Context, tx pgx.Tx, s Selection) ([]int64, error) {
	return rows.Values[int64](ctx, tx, "find events of a key", selectIDsOfKey, s.Key, s.Receiver, s.Source)
}

// Each branch has its own index. ORDER BY names its columns: without it the planner may read
// the primary key where statistics are old. $4 and $5 switch branches off, $3 is the most that is
// read of each.
const (
	selectOpenIDs = openIDsHead + `
    (SELECT e.inbox_id FROM inbox_events e
     WHERE $4::boolean AND e.receiver = p.receiver AND e.source = p.source AND e.processing_state = 'pending' AND e.next_attempt_at IS NOT NULL
     ORDER BY e.event_type LIMIT $3::bigint)
    UNION ALL
    (SELECT e.inbox_id FROM inbox_events e
     WHERE $4::boolean AND e.receiver = p.receiver AND e.source = p.source AND e.processing_state = 'pending' AND e.next_attempt_at IS NULL
     ORDER BY e.ordering_key LIMIT $3::bigint)
    UNION ALL
    (SELECT e.inbox_id FROM inbox_events e
     WHERE $5::boolean AND e.receiver = p.receiver AND e.source = p.source AND e.processing_state = 'processing'
     ORDER BY e.claimed_at LIMIT $3::bigint)` + openIDsTail

	selectOpenIDsOfKey = openIDsHead + `
    (SELECT e.inbox_id FROM inbox_events e
     WHERE e.receiver = p.receiver AND e.source = p.source AND e.ordering_key = $6::text
       AND (e.processing_state = 'processing' OR e.processing_state = 'pending' AND e.next_attempt_at IS NOT NULL) LIMIT 1)
    UNION ALL
    (SELECT e.inbox_id FROM inbox_events e
     WHERE $4::boolean AND e.receiver = p.receiver AND e.source = p.source AND e.ordering_key = $6::text
       AND e.processing_state = 'pending' AND e.next_attempt_at IS NULL
     ORDER BY e.sequence LIMIT $3::bigint)
    UNION ALL
    (SELECT e.inbox_id FROM inbox_events e
     WHERE $5::boolean AND e.receiver = p.receiver AND e.source = p.source AND e.ordering_key = $6::text AND e.processing_state = 'failed'
     ORDER BY e.sequence LIMIT $3::bigint)` + openIDsTail

	openIDsHead = `
SELECT i.inbox_id
FROM unnest($1::text[], $2::text[]) AS p (receiver, source) CROSS JOIN LATERAL (`
	openIDsTail = `
) i
LIMIT $3::bigint`
)

// openIDs returns the inbox ids of pending events and of those that are being worked, as the
// selection has it; with an ordering key, only its own, and the failed ones as well. It returns at
// most limit ids.
func openIDs(ctx context.Context, tx pgx.Tx, list []Sender, s Selection, limit int64) ([]int64, error) {
	receivers, sources := columns(list)
	query, args := selectOpenIDs, []any{receivers, sources, limit, s.has(Pending), s.has(Processing)}
	if s.OrderingKey != "" {
		query, args = selectOpenIDsOfKey, []any{receivers, sources, limit, s.has(Pending), s.has(Failed), s.OrderingKey}
	}
	return rows.Values[int64](ctx, tx, "find open events", query, args...)
}

// The range that one statement reads: %[1]s is where, %[2]s the direction, %[3]s max or min.
const selectReach = `
SELECT coalesce(%[3]s(r.inbox_id), 0), count(*)
FROM (SELECT e.inbox_id FROM inbox_events e
      WHERE e.inbox_id >= $1::bigint AND e.inbox_id <= $2::bigint%[1]s ORDER BY e.inbox_id%[2]s LIMIT $3::bigint) r`

// reach returns the id up to which the next statement may read, and how many rows lie before it.
func (w *way) reach(ctx context.Context, tx pgx.Tx) (last, read int64, err error) {
	where, args := w.part([]any{w.from, w.to, w.look})
	err = tx.QueryRow(ctx, fmt.Sprintf(selectReach, where, w.direction(), map[bool]string{true: "min", false: "max"}[w.desc]), args...).Scan(&last, &read)
	if err != nil {
		return 0, 0, fmt.Errorf("find events: %w", err)
	}
	return last, read, nil
}

// forReview is the predicate of an index.
const forReview = ` AND e.receiver = $%d AND e.source = $%d AND e.processing_state IN ('failed', 'ignored')`

// part returns the condition that leads to the way's index, beside the range of ids.
func (w *way) part(args []any) (string, []any) {
	if w.sender == nil {
		return "", args
	}
	n := len(args)
	return fmt.Sprintf(forReview, n+1, n+2), append(args, w.sender.Receiver, w.sender.Source)
}

func (w *way) direction() string {
	if w.desc {
		return " DESC"
	}
	return ""
}

// A payload itself is never read; see inbox_has_payload in the migrations.
const (
	selectCandidates = `
SELECT e.inbox_id, e.receiver, e.source, e.idempotency_key, e.event_type, e.processing_state, e.claim,
       CASE WHEN $1::boolean THEN inbox_has_payload(e.inbox_id) ELSE true END
FROM inbox_events e
WHERE `
	ofIDs   = `e.inbox_id = ANY ($2::bigint[])`
	inRange = `e.inbox_id >= $2::bigint AND e.inbox_id <= $3::bigint`
	inOrder = `
ORDER BY e.inbox_id`
)

// candidates returns the matching events from where the way is up to the given id.
func (w *way) candidates(ctx context.Context, tx pgx.Tx, s Selection, last int64, needPayload bool, limit int64) ([]candidate, error) {
	first := w.from
	if w.desc {
		first, last = last, w.to
	}
	part, args := w.part([]any{needPayload, first, last})
	where, args := s.conditions(args)
	if len(s.States) > 0 {
		args = append(args, s.States)
		where += fmt.Sprintf(" AND e.processing_state || '' = ANY ($%d::text[])", len(args)) // by no index but that of the way
	}
	args = append(args, limit)
	return collectCandidates(ctx, tx, selectCandidates+inRange+part+where+inOrder+w.direction()+fmt.Sprintf(" LIMIT $%d", len(args)), args)
}

// candidatesByID returns the events with these ids that match, in any state.
func candidatesByID(ctx context.Context, tx pgx.Tx, s Selection, ids []int64, needPayload bool) ([]candidate, error) {
	where, args := s.conditions([]any{needPayload, ids})
	return collectCandidates(ctx, tx, selectCandidates+ofIDs+where+inOrder, args)
}

func collectCandidates(ctx context.Context, tx pgx.Tx, query string, args []any) ([]candidate, error) {
	return rows.Structs[candidate](ctx, tx, "find events", query, args...)
}

// conditions returns those of the selection that are given, but for its states and ids. Expressions
// keep them from leading the planner to another index than that of the way.
func (s Selection) conditions(args []any) (string, []any) {
	where := ""
	for _, c := range []struct {
		text  string
		given bool
		value any
	}{
		{"e.receiver || '' =", s.Receiver != "", s.Receiver},
		{"e.source || '' =", s.Source != "", s.Source},
		{"e.event_type || '' LIKE", s.Type != "", batch.LikePattern(s.Type)},
		{"e.idempotency_key || '' =", s.Key != "", s.Key},
		{"e.ordering_key || '' =", s.OrderingKey != "", s.OrderingKey},
		{"e.related_reference =", s.RelatedReference != "", s.RelatedReference},
		{"e.received_at >=", !s.Since.IsZero(), s.Since},
		{"e.received_at <", !s.Until.IsZero(), s.Until},
		{"e.inbox_id >=", s.FromID != 0, s.FromID},
		{"e.inbox_id <=", s.ToID != 0, s.ToID},
	} {
		if c.given {
			args = append(args, c.value)
			where += fmt.Sprintf(" AND %s $%d", c.text, len(args))
		}
	}
	return where, args
}
