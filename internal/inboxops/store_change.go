package inboxops

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/inboxsql"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// Events are changed only as they were found: with the same claim, still in the same state. One
// that others hold locked is being changed, and is left alone. Rows are named by inbox_id, not by
// ctid, which support may not read.
const lockFound = `
WITH found AS MATERIALIZED (
    SELECT o.inbox_id
    FROM unnest($1::bigint[], $2::bigint[], $3::text[]) AS f (inbox_id, claim, state)
    CROSS JOIN LATERAL (
        SELECT e.inbox_id FROM inbox_events e
        WHERE e.inbox_id = f.inbox_id AND e.claim = f.claim AND e.processing_state || '' = f.state
        LIMIT 1
        FOR UPDATE SKIP LOCKED
    ) o
)`

// replayEvents makes events pending. Those of an ordering key wait: release decides which of them
// is next.
const replayEvents = lockFound + `, changed AS (
    UPDATE inbox_events e
    SET processing_state = 'pending', attempts = 0, interruptions = 0, processed_at = NULL,
        next_attempt_at = CASE WHEN e.ordering_key IS NULL THEN now() END
    WHERE e.inbox_id = ANY (ARRAY(SELECT inbox_id FROM found))
    RETURNING e.receiver, e.source, e.ordering_key
)` + countChanged

// ignoreEvents sets events aside.
const ignoreEvents = lockFound + `, changed AS (
    UPDATE inbox_events e
    SET processing_state = 'ignored', processed_at = clock_timestamp(), next_attempt_at = NULL
    WHERE e.inbox_id = ANY (ARRAY(SELECT inbox_id FROM found))
    RETURNING e.receiver, e.source, e.ordering_key
)` + countChanged

const countChanged = `
SELECT receiver, source, coalesce(ordering_key, ''), count(*) FROM changed GROUP BY receiver, source, ordering_key`

// changedKey counts the events of an ordering key that were changed; an empty key is none.
type changedKey struct {
	Receiver, Source, OrderingKey string
	Events                        int64
}

// change runs one of the two statements in its own transaction.
func (o *Ops) change(ctx context.Context, statement string, found []candidate) (changed []changedKey, err error) {
	ids, claims, states := make([]int64, len(found)), make([]int64, len(found)), make([]string, len(found))
	for i, c := range found {
		ids[i], claims[i], states[i] = c.InboxID, c.Claim, c.State
	}
	err = o.write(ctx, func(tx pgx.Tx) error {
		changed, err = rows.Structs[changedKey](ctx, tx, "change events", statement, ids, claims, states)
		return err
	})
	return changed, err
}

// lockOrder takes the lock of an ordering key, for which [pinSQL] bounds the wait.
const lockOrder = `SELECT ` + inboxsql.KeyLock

// releaseBatch is how many ordering keys one transaction releases: their recorders wait until it
// ends.
const releaseBatch = 20

// release makes the next event of each changed ordering key due. It returns how many keys it had to
// leave to the workers, because others held their lock for too long.
func (o *Ops) release(ctx context.Context, changed []changedKey) (left int64, err error) {
	keys := slices.DeleteFunc(slices.Clone(changed), func(c changedKey) bool { return c.OrderingKey == "" })
	// In one order, so that two operators do not wait for each other in a circle.
	slices.SortFunc(keys, func(a, b changedKey) int {
		return cmp.Or(cmp.Compare(a.Receiver, b.Receiver), cmp.Compare(a.Source, b.Source), cmp.Compare(a.OrderingKey, b.OrderingKey))
	})
	for batch := range slices.Chunk(keys, releaseBatch) {
		if err = o.releaseKeys(ctx, batch); !pg.IsConflict(err) {
			if err != nil {
				return left, err
			}
			continue
		}
		for _, key := range batch { // one by one: a lock that is held keeps only its own key
			if err := o.releaseKeys(ctx, []changedKey{key}); pg.IsConflict(err) {
				left++
			} else if err != nil {
				return left, err
			}
		}
	}
	return left, nil
}

// releaseKeys releases ordering keys in one transaction. The statements of a key are three, so that
// each has a snapshot from after the lock: after GiveWay no event of the key can begin to be
// worked, and Promote sees whether one began before.
func (o *Ops) releaseKeys(ctx context.Context, keys []changedKey) error {
	err := o.write(ctx, func(tx pgx.Tx) error {
		batch := &pgx.Batch{}
		for _, key := range keys {
			batch.Queue(lockOrder, key.Receiver, key.Source, key.OrderingKey)
			batch.Queue(inboxsql.GiveWay, key.Receiver, key.Source, key.OrderingKey)
			// As if a failed event blocks its key. Where none does, workers promote within 30 s.
			batch.Queue(inboxsql.PromoteByID, key.Receiver, key.Source, key.OrderingKey, true)
		}
		return tx.SendBatch(ctx, batch).Close()
	})
	if err != nil {
		return fmt.Errorf("release ordering keys: %w", err)
	}
	return nil
}

// notifyWorkers is notifySQL of the package consumer: a test has a worker that does not poll, and
// fails when its payload is another.
const notifyWorkers = `SELECT pg_notify('inbox_wake', 'inbox_events'::regclass::oid::text || ' ' || $1::text || ' ' || $2::text)`

// notify wakes the workers of the receivers whose events were changed. It runs in a transaction of
// its own, because sessions that notify commit one after the other.
func (o *Ops) notify(ctx context.Context, changed []changedKey) error {
	told := map[Sender]bool{}
	for _, c := range changed {
		sender := Sender{c.Receiver, c.Source}
		if told[sender] {
			continue
		}
		told[sender] = true
		err := o.write(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, notifyWorkers, sender.Receiver, sender.Source)
			return err
		})
		if err != nil {
			return fmt.Errorf("notify workers, which find it by themselves when they poll: %w", err)
		}
	}
	return nil
}
