// Package inboxsql holds what receivers and the commands for an inbox run alike. The order of an
// ordering key depends on both running the same statements.
package inboxsql

// KeyLock serialises recording, finishing and replaying events of one ordering key, until the end
// of each transaction. The number separates it from other advisory locks made of hashes; it reads
// "order".
const KeyLock = `pg_advisory_xact_lock(hashtextextended($1::text || E'\n' || $2::text || E'\n' || $3::text, 478660552050 # 'inbox_events'::regclass::oid::bigint))`

// GiveWay makes the released event of a key wait again if an earlier one waits and this one is not
// being processed. The earlier one is a replay, which goes first.
const GiveWay = `
UPDATE inbox_events e
SET next_attempt_at = NULL
WHERE e.receiver = $1::text AND e.source = $2::text AND e.ordering_key = $3::text AND e.processing_state = 'pending' AND e.next_attempt_at IS NOT NULL
  AND EXISTS (SELECT FROM inbox_events w
      WHERE w.receiver = $1::text AND w.source = $2::text AND w.ordering_key = $3::text AND w.processing_state = 'pending' AND w.next_attempt_at IS NULL
        AND (w.sequence, w.inbox_id) < (e.sequence, e.inbox_id))`

// Promote releases the next event of an ordering key. It does nothing if an event of the key is
// already released, or, where $4 is true, if an earlier one has failed and blocks it. It runs under
// the key's lock, in a statement after [GiveWay]. The event takes the place in the queue that it
// has by its age. At the end of the queue, a key would wait for the whole backlog once for each of
// its events.
//
// [PromoteByID] is for logins that may read some columns alone, and so not ctid.
const (
	Promote     = promoteHead + `e.ctid = (SELECT w.ctid` + promoteTail
	PromoteByID = promoteHead + `e.inbox_id = (SELECT w.inbox_id` + promoteTail

	promoteHead = `
UPDATE inbox_events e
SET next_attempt_at = CASE WHEN e.claim = 0 THEN e.received_at ELSE now() END
WHERE `
	promoteTail = `
    FROM inbox_events w
    WHERE w.receiver = $1::text AND w.source = $2::text AND w.ordering_key = $3::text AND w.processing_state = 'pending' AND w.next_attempt_at IS NULL
    ORDER BY w.sequence, w.inbox_id
    LIMIT 1
  )
  AND e.processing_state = 'pending' AND e.next_attempt_at IS NULL
  AND NOT EXISTS (SELECT FROM inbox_events g WHERE g.receiver = $1::text AND g.source = $2::text AND g.ordering_key = $3::text
      AND (g.processing_state = 'processing' OR g.processing_state = 'pending' AND g.next_attempt_at IS NOT NULL))
  AND NOT ($4::boolean AND EXISTS (SELECT FROM inbox_events f WHERE f.receiver = $1::text AND f.source = $2::text AND f.ordering_key = $3::text
      AND f.processing_state = 'failed' AND (f.sequence, f.inbox_id) < (e.sequence, e.inbox_id)))`
)

// Kinds begins a statement with the types of the events that may be claimed. It steps from type to
// type by the index and does not read the events between them.
const Kinds = `
WITH RECURSIVE kind AS (
    (SELECT event_type FROM inbox_events
     WHERE receiver = $1::text AND source = $2::text AND processing_state = 'pending' AND next_attempt_at IS NOT NULL
     ORDER BY event_type LIMIT 1)
    UNION ALL
    SELECT (SELECT e.event_type FROM inbox_events e
            WHERE e.receiver = $1::text AND e.source = $2::text AND e.processing_state = 'pending' AND e.next_attempt_at IS NOT NULL AND e.event_type > kind.event_type
            ORDER BY e.event_type LIMIT 1)
    FROM kind WHERE kind.event_type IS NOT NULL
)`
