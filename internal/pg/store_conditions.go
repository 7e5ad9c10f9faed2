package pg

// Parts of statements that several rooms share.

// NameOfSession is the application_name that the session of a relay r has, and no other connection
// of it.
const NameOfSession = `'outbox-relay session ' || r.id`

// HasSession is true of a relay r whose session is connected to this database. The row of a copied
// database has a session on another server or in another database. The name ends with the session's
// settings: a backend that a pooler keeps, or a new one with the same pid, does not have it. Every
// role may see what is compared here.
const HasSession = `(r.server_started_at = pg_postmaster_start_time() AND EXISTS (
    SELECT FROM pg_stat_get_activity(coalesce(r.session_pid, 0)) a
    WHERE a.application_name = ` + NameOfSession + ` AND a.datid = (SELECT oid FROM pg_database WHERE datname = current_database())))`

// IsAlive is true of a relay r that has said lately that it lives, and whose session, if it has
// one, is connected.
const IsAlive = `(r.heartbeat_at > now() - CASE WHEN r.asleep THEN interval '60 seconds' ELSE interval '10 seconds' END
    AND (r.session_pid IS NULL OR ` + HasSession + `))`

// isVoid is true of a delivery d whose claim has ended before its lease. The array is mostly empty,
// and is read once a statement, when the first leased row is met.
const isVoid = `(d.claimed_by = ANY (ARRAY (SELECT v.relay_id FROM outbox_void v)) AND EXISTS (
    SELECT FROM outbox_void v
    WHERE v.relay_id = d.claimed_by AND d.lease_expires_at > v.after AND d.lease_expires_at <= v.until AND ` + VoidReaches + `))`

// VoidReaches is true of a row v of outbox_void that may end the claim of a delivery d. One of a
// relay that has died or left ends them all. One of a relay whose claims got no answer ends those,
// which are odd, and not what this relay has in hand of its ranges and written rows of meanwhile,
// whose claims are the fences of the ranges, and even.
const VoidReaches = `(v.after = '-infinity' OR d.claim % 2 = 1)`

// IsFree is true of a pending delivery d that no relay has in flight. No lease is longer than a day
// (relay.Config): one that ends in more than two was written before the database's clock was put
// back, and would hold the delivery until that time comes.
const IsFree = `(d.lease_expires_at IS NULL OR d.lease_expires_at <= now() OR d.lease_expires_at > now() + interval '2 days' OR ` + isVoid + `)`

// IsHeld is true of a destination s of which the relay $1 may claim nothing now.
const IsHeld = `(s.paused OR s.breaker = 'open' OR s.breaker_relay_id <> $1)`

// IsDue is true of a pending delivery d that stands in the index of what is due: it waits for
// nothing but its time. IsWaiting is true of one that waits behind the head of its ordering key, in
// its own index.
const (
	IsDue     = `d.status = 'pending' AND d.blocked_by IS NULL`
	IsWaiting = `d.status = 'pending' AND d.blocked_by IS NOT NULL`
)

// HasNotJoined is true of a pending delivery d that has not joined its ordering key: it is not due
// yet, or became due a moment ago. It holds no other delivery. Of those that have joined, (joined,
// event_id) is the order. See docs/decisions/0072-an-event-joins-its-key-when-it-is-due.md.
const HasNotJoined = `d.status = 'pending' AND d.ordering_key IS NOT NULL AND d.joined IS NULL`

// QueueHasRoom guards every notification, as the trigger of the events does. A session that listens
// and never ends its transaction lets others fill the server's queue, and then no transaction that
// notifies can commit: no breaker would close, and no replay, discard or change of routes would
// succeed. Relays find by polling what they are not notified of.
const QueueHasRoom = `pg_notification_queue_usage() < 0.5`

// CommitDurably begins a transaction whose result, such as a failed delivery and its alert, must
// survive a crash of the server.
const CommitDurably = `SET LOCAL synchronous_commit = on`

// RequestSweep makes relays look behind their positions.
const RequestSweep = `SELECT pg_notify('outbox_wake', 'sweep ' || current_schema()) WHERE ` + QueueHasRoom

// Pending is the part of a WITH RECURSIVE that finds the destinations of pending deliveries. It
// goes from one name to the next in the two indexes, instead of through everything that is pending.
const Pending = `pending (destination) AS (
    SELECT least((SELECT d.destination FROM outbox_delivery d WHERE ` + IsDue + ` ORDER BY d.destination LIMIT 1),
                 (SELECT d.destination FROM outbox_delivery d WHERE ` + IsWaiting + ` ORDER BY d.destination LIMIT 1))
    UNION ALL
    SELECT least((SELECT d.destination FROM outbox_delivery d WHERE ` + IsDue + ` AND d.destination > p.destination ORDER BY d.destination LIMIT 1),
                 (SELECT d.destination FROM outbox_delivery d WHERE ` + IsWaiting + ` AND d.destination > p.destination ORDER BY d.destination LIMIT 1))
    FROM pending p WHERE p.destination IS NOT NULL
)`

// PendingOf completes "SELECT count(*) FROM (VALUES (name)) ": it finds the pending deliveries of
// the named destination, up to 10,001. Without the order of the index, a plan may go through all
// that was delivered.
const PendingOf = `of (destination) CROSS JOIN LATERAL (
    (SELECT FROM outbox_delivery d WHERE d.destination = of.destination AND ` + IsDue + `
     ORDER BY d.destination, d.replay, d.next_attempt_at, d.event_id LIMIT 10001)
    UNION ALL
    (SELECT FROM outbox_delivery d WHERE d.destination = of.destination AND ` + IsWaiting + `
     ORDER BY d.destination, d.blocked_by, d.event_id LIMIT 10001)
    LIMIT 10001) found`

// NextDue is a subselect that finds when the next delivery of a lane is due, behind a "lane
// (destination)"; NULL: nothing waits for its time alone.
const NextDue = `SELECT min(n.next_attempt_at) FROM (VALUES (false), (true)) x (replay) CROSS JOIN LATERAL (
        SELECT d.next_attempt_at FROM outbox_delivery d
        WHERE d.destination = lane.destination AND d.replay = x.replay AND ` + IsDue + ` ORDER BY d.next_attempt_at, d.event_id LIMIT 1) n`

// WaitUntil is a subselect that finds until when a destination has asked all living relays to wait,
// behind a "lane (destination)"; NULL: one may send. What its 429s and 503s ask of one relay does
// not keep another from trying.
const WaitUntil = `SELECT CASE WHEN bool_and(s.wait_until IS NOT NULL AND s.wait_until > now()) THEN min(s.wait_until) END
        FROM outbox_relay_destination s JOIN outbox_relay r ON r.id = s.relay_id WHERE s.destination = lane.destination AND ` + IsAlive

// Unserved selects the destinations with pending deliveries that no registered relay serves.
const Unserved = `
WITH RECURSIVE ` + Pending + UnservedOf

// UnservedOf does so in a statement whose WITH has found the destinations of pending deliveries, as
// [Pending].
const UnservedOf = `
SELECT p.destination, (SELECT count(*) FROM (VALUES (p.destination)) ` + PendingOf + `) AS pending
FROM pending p
WHERE p.destination <> '' AND NOT EXISTS (SELECT FROM outbox_relay_destination s WHERE s.destination = p.destination)
ORDER BY p.destination`

// RelaysDisagree is true while a registered relay was configured without some of the stored routes.
const RelaysDisagree = `EXISTS (SELECT FROM outbox_relay_route GROUP BY relay_id HAVING count(*) < (SELECT count(*) FROM outbox_route))`
