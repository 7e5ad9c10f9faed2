package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/process"
)

// createFacts makes tables of everything that is known when a play is over, in the database of
// finance: what stands there and in the other database, and what was seen on the wire between them.
// gather fills the last three.
const createFacts = `
CREATE SCHEMA facts;
CREATE TABLE facts.invoice AS SELECT number || '-issued' AS key, pg_xact_commit_timestamp(xmin) AS at FROM invoices;
CREATE TABLE facts.event AS -- with its delivery, and the delivery id of the last claim
    SELECT o.id, o.idempotency_key AS key, o.ordering_key, count(d.event_id) AS deliveries, min(d.status) AS status, min(d.attempts) AS attempts,
           min(format('%s-%s-%s', d.event_id, d.destination, d.claim)) AS delivery,
           CASE WHEN o.available_at > o.created_at THEN o.available_at END AS due, -- NULL: when it was committed
           o.created_at::timestamptz AS began -- its transaction
    FROM outbox o LEFT JOIN outbox_delivery d ON d.event_id = o.id GROUP BY o.id;
CREATE TABLE facts.failure AS -- what the relay's log says of attempts that did not deliver; a held one does not count
    SELECT DISTINCT ON (delivery) event_id, format('%s-%s-%s', event_id, destination, claim) AS delivery, reason,
           started_at + duration_ms * interval '1 ms' AS ended, outcome = 'hold' AS held
    FROM outbox_attempt WHERE outcome <> 'delivered' ORDER BY delivery, id DESC;
CREATE TABLE facts.lost_claim AS
    SELECT delivery, coalesce(life, 'relay ' || relay_id) AS life FROM demo_lost_claim LEFT JOIN demo_relay USING (relay_id);
CREATE TABLE facts.shipment (expected text, key text, at timestamptz); -- expected: the key that the invoice ought to have
CREATE TABLE facts.processed (key text);
CREATE TABLE facts.request (
    key text, delivery text, at timestamptz, fault text, status integer, replayed boolean, answered_at timestamptz,
    succeeded boolean GENERATED ALWAYS AS (status BETWEEN 200 AND 299) STORED
)`

const selectShipments = `SELECT invoice || '-issued', idempotency_key, pg_xact_commit_timestamp(xmin) FROM shipments ORDER BY id`

const selectProcessed = `SELECT idempotency_key FROM processed_events`

// gather collects the facts, after all is settled.
func (s *stage) gather() error {
	_, err := s.finance.Exec(s.Ctx, createFacts)
	fill := func(source pgx.CopyFromSource, table string, columns ...string) {
		if err == nil {
			_, err = s.finance.CopyFrom(s.Ctx, pgx.Identifier{"facts", table}, columns, source)
		}
	}
	shipments, _ := s.logistics.Query(s.Ctx, selectShipments) // CopyFrom returns its error
	defer shipments.Close()
	fill(shipments, "shipment", "expected", "key", "at")
	processed, _ := s.logistics.Query(s.Ctx, selectProcessed)
	defer processed.Close()
	fill(processed, "processed", "key")
	requests := s.network.seen()
	fill(pgx.CopyFromSlice(len(requests), func(i int) ([]any, error) {
		r := &requests[i]
		return []any{r.key, r.delivery, r.at, string(r.fault), r.status, r.replayed, r.answeredAt}, nil
	}), "request", "key", "delivery", "at", "fault", "status", "replayed", "answered_at")
	if err == nil {
		_, err = s.finance.Exec(s.Ctx, addLostRanges)
	}
	if err != nil {
		return fmt.Errorf("collect what has happened: %w", err)
	}
	return nil
}

// addLostRanges says of each request for an event of a range that was taken over that its claim was
// lost: no row says so.
const addLostRanges = `
INSERT INTO facts.lost_claim
SELECT DISTINCT r.delivery, coalesce(d.life, 'relay ' || l.relay_id)
FROM facts.request r JOIN demo_lost_range l ON l.fence = substring(r.delivery FROM '[0-9]+$') LEFT JOIN demo_relay d USING (relay_id)
WHERE NOT EXISTS (SELECT FROM facts.lost_claim c WHERE c.delivery = r.delivery)`

// A rule is one promise, and every way in which the facts break it.
type rule struct {
	promise string
	query   string // of the breaches
	broken  []string
}

// rules returns what outbox-relay promises, by the databases and the wire, not by what anybody
// believes to have done.
func rules() []rule {
	return []rule{
		{promise: "every committed invoice has exactly one shipment", query: `
SELECT format(CASE count(s.key) WHEN 0 THEN 'lost: %s is committed and has no shipment' ELSE 'doubled: %s has %s shipments' END, i.key, count(s.key))
FROM facts.invoice i LEFT JOIN facts.shipment s ON s.expected = i.key GROUP BY i.key HAVING count(s.key) <> 1`},
		{promise: "nothing was ever seen of an invoice that was rolled back", query: `
SELECT i.key || ' was rolled back and is an invoice' FROM demo_note n JOIN facts.invoice i ON what = 'rolled back' AND name = key
UNION ALL SELECT key || ' was rolled back and has an event' FROM demo_note JOIN facts.event ON what = 'rolled back' AND name = key
UNION ALL SELECT expected || ' is no committed invoice and has a shipment' FROM facts.shipment WHERE expected NOT IN (SELECT key FROM facts.invoice)
UNION ALL SELECT key || ' is no committed event and was POSTed' FROM facts.request WHERE key NOT IN (SELECT key FROM facts.event)`},
		{promise: "every committed event is marked delivered, once", query: `
SELECT i.key || CASE WHEN e.key IS NULL THEN ' has no event' WHEN deliveries <> 1 THEN format(' has %s deliveries', deliveries) ELSE ' is ' || status END
FROM facts.invoice i LEFT JOIN facts.event e USING (key) WHERE e.key IS NULL OR deliveries <> 1 OR status <> 'delivered'`},
		{promise: "processed_events and shipments hold the same keys", query: `
SELECT key || CASE WHEN s.key IS NULL THEN ' is processed and not shipped' ELSE ' is shipped and not processed' END
FROM facts.processed p FULL JOIN (SELECT DISTINCT key FROM facts.shipment) s USING (key) WHERE p.key IS NULL OR s.key IS NULL`},
		// A recorded cause for every request that is not the one that delivered its event: a fault
		// that the relay's attempt log agrees with, or the death of the relay whose claim it was.
		// An answer in the last second of the relay's patience may not have got there. A dead
		// relay's last settle may have been on its way when its claim was another's: it logs, and
		// counts no more.
		{promise: "every request on the wire is explained, and every attempt counted", query: `
WITH wire AS (
    SELECT r.*, e.status = 'delivered' AND r.delivery = e.delivery AS delivered, f.reason, l.life, n.name IS NOT NULL AS killed,
           NOT succeeded OR fault IN ('lose', 'late') OR reason = 'timeout' AND ended - answered_at < interval '1 s' AS explained,
           row_number() OVER (PARTITION BY r.delivery) AS nth
    FROM facts.request r JOIN facts.event e USING (key) LEFT JOIN facts.failure f ON f.delivery = r.delivery
         LEFT JOIN facts.lost_claim l ON l.delivery = r.delivery LEFT JOIN demo_note n ON what = 'killed' AND name = life
), attempt AS (
    SELECT e.key, e.attempts, 1 + count(f.delivery) AS made, count(l.delivery) AS uncounted
    FROM facts.event e LEFT JOIN facts.failure f ON f.event_id = e.id AND NOT held LEFT JOIN facts.lost_claim l ON l.delivery = f.delivery
    WHERE e.status = 'delivered' GROUP BY e.key, e.attempts
)
SELECT format('%s: %s was POSTed twice under one claim', key, delivery) FROM wire WHERE nth > 1
UNION ALL SELECT format('%s: delivered by %s, which was not answered 2xx', key, delivery) FROM wire WHERE delivered AND (NOT succeeded OR fault = 'lose')
UNION ALL SELECT format('%s: %s was answered %s, yet the relay says %s', key, delivery, status, reason) FROM wire
    WHERE NOT delivered AND reason IS NOT NULL AND NOT explained
UNION ALL SELECT format('%s: %s lost its claim %s, and it was not killed', key, life, delivery) FROM wire
    WHERE NOT delivered AND reason IS NULL AND life IS NOT NULL AND NOT killed
UNION ALL SELECT format('%s: %s is an extra request without a cause', key, delivery) FROM wire WHERE NOT delivered AND reason IS NULL AND life IS NULL
UNION ALL SELECT format('%s: %s was answered %s before its effect was committed', key, delivery, status) FROM wire
    WHERE succeeded AND NOT EXISTS (SELECT FROM facts.shipment s WHERE s.expected = wire.key AND s.at <= answered_at)
UNION ALL SELECT format('%s: delivered by %s, which was never on the wire', key, delivery) FROM facts.event e
    WHERE status = 'delivered' AND NOT EXISTS (SELECT FROM facts.request r WHERE r.key = e.key AND r.delivery = e.delivery)
UNION ALL SELECT format('%s: %s attempts are counted, %s were made', key, attempts, made) FROM attempt WHERE attempts NOT BETWEEN made - uncounted AND made`},
		// Within each key: ids in the order of the commits, no request for an event before its time
		// or before those in front of it were taken, and the effects in the same order. What comes
		// first is exact among events that were due at once, and among those that were due later.
		// Of one of each a quarter of a second may be between them: an event is due later if it is
		// due a tenth of a second after its insert at least (decision 72), and it is seen some time
		// after the time of its commit.
		{promise: "events of one ordering key arrive in the order in which they became due, and then were committed", query: `
WITH wire AS (
    SELECT key, min(at) AS posted, min(answered_at) FILTER (WHERE succeeded) AS taken FROM facts.request GROUP BY key
), effect AS (
    SELECT expected AS key, min(at) AS effect FROM facts.shipment GROUP BY expected
), event AS (
    SELECT e.*, i.at AS committed, greatest(due, i.at) AS ready, due IS NOT NULL AS later, posted, taken, effect
    FROM facts.event e LEFT JOIN facts.invoice i USING (key) LEFT JOIN wire USING (key) LEFT JOIN effect USING (key) WHERE ordering_key IS NOT NULL
), pair AS (
    SELECT e.*, b.key || CASE WHEN b.later THEN ', due later,' ELSE '' END AS before, b.taken AS before_taken, b.effect AS before_effect
    FROM event e JOIN event b ON b.ordering_key = e.ordering_key
        AND CASE WHEN b.later <> e.later THEN b.ready < coalesce(e.due, e.began) - interval '250 ms'
                 WHEN e.later THEN (b.ready, b.id) < (e.ready, e.id) ELSE b.id < e.id END
)
SELECT format('%s was committed before %s, and has the larger id', key, before) FROM (
    SELECT key, lag(key) OVER own AS before, committed < lag(committed) OVER own AS earlier FROM event WINDOW own AS (PARTITION BY ordering_key ORDER BY id)) c
    WHERE earlier
UNION ALL SELECT format('%s was POSTed before it was due', key) FROM event WHERE posted < due
UNION ALL (SELECT DISTINCT ON (key) format('%s%s was POSTed before %s was taken', key, CASE WHEN later THEN ', due later,' END, before) FROM pair
    WHERE before_taken IS NULL AND posted IS NOT NULL OR posted < before_taken ORDER BY key, before_taken DESC)
UNION ALL (SELECT DISTINCT ON (key) format('the effect of %s%s came before that of %s', key, CASE WHEN later THEN ', due later,' END, before) FROM pair
    WHERE effect < before_effect ORDER BY key, before_effect DESC)`},
	}
}

// figures are what a play comes to. Latencies are from commit in finance to commit in logistics.
type figures struct {
	Committed, RolledBack         int
	Posts, Retries, Suppressed    int
	Late, Refused, AnswersLost    int
	Effects, Lost, Doubled        int
	RelaysKilled, ReceiversKilled int
	P50, P99                      time.Duration
}

const selectFigures = `
WITH effect AS (
    SELECT i.key, count(s.key) AS effects, coalesce(min(s.at) - i.at, '0') AS latency
    FROM facts.invoice i LEFT JOIN facts.shipment s ON s.expected = i.key GROUP BY i.key, i.at
), wire AS (
    SELECT count(*), count(*) - count(DISTINCT key), count(*) FILTER (WHERE replayed), count(*) FILTER (WHERE fault = 'late'),
           count(*) FILTER (WHERE fault = 'refuse' AND status = 500), count(*) FILTER (WHERE fault = 'lose' AND succeeded)
    FROM facts.request
), note AS (
    SELECT count(*) FILTER (WHERE what = 'rolled back') AS rolled_back, count(*) FILTER (WHERE what = 'killed') AS killed,
           count(*) FILTER (WHERE what = 'died') AS died
    FROM demo_note
)
SELECT (SELECT count(*) FROM facts.invoice), note.rolled_back, wire.*, (SELECT count(*) FROM facts.shipment),
       (SELECT count(*) FROM effect WHERE effects = 0), (SELECT coalesce(sum(effects - 1), 0)::bigint FROM effect WHERE effects > 0), killed, died,
       (SELECT coalesce(percentile_disc(0.5) WITHIN GROUP (ORDER BY latency), '0') FROM effect WHERE effects > 0),
       (SELECT coalesce(percentile_disc(0.99) WITHIN GROUP (ORDER BY latency), '0') FROM effect WHERE effects > 0)
FROM note, wire`

// check counts what has happened, and holds the facts against the rules.
func check(ctx context.Context, db process.Querier) (n figures, all []rule, err error) {
	rows, _ := db.Query(ctx, selectFigures) // errors come with the rows
	if n, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[figures]); err != nil {
		return n, nil, fmt.Errorf("count what has happened: %w", err)
	}
	all = rules()
	for i := range all {
		rows, _ := db.Query(ctx, all[i].query+" ORDER BY 1")
		if all[i].broken, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
			return n, nil, fmt.Errorf("check that %s: %w", all[i].promise, err)
		}
	}
	return n, all, nil
}
