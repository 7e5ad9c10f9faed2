package identity

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/rows"
)

// All statements here are run as they are, not prepared: they are rare, and a pooler may be in
// between.

// facts are what one look at a database tells: what it is, and what is recorded in it.
type facts struct {
	Identity
	standby  bool
	recorded *Identity
}

const selectFacts = `
SELECT (SELECT system_identifier FROM pg_control_system()), (SELECT timeline_id FROM pg_control_checkpoint()),
       d.oid::bigint, pg_is_in_recovery(),
       i.system_identifier, i.timeline, i.database_oid, i.environment, i.addresses, i.recorded_at
FROM pg_database d LEFT JOIN outbox_identity i ON true
WHERE d.datname = current_database()`

// Some hardened servers let only superusers read the control file.
const selectFactsWithoutControl = `
SELECT 0::bigint, 0, d.oid::bigint, pg_is_in_recovery(),
       i.system_identifier, i.timeline, i.database_oid, i.environment, i.addresses, i.recorded_at
FROM pg_database d LEFT JOIN outbox_identity i ON true
WHERE d.datname = current_database()`

// readFacts looks at the database. The environment and address of what it returns are the caller's
// to fill in.
func readFacts(ctx context.Context, q pg.DB) (facts, error) {
	var f facts
	var system, oid *int64
	var timeline *int32
	var environment *string
	var addresses []string
	var at *time.Time
	into := []any{&f.SystemIdentifier, &f.Timeline, &f.DatabaseOID, &f.standby, &system, &timeline, &oid, &environment, &addresses, &at}
	err := q.QueryRow(ctx, selectFacts, pgx.QueryExecModeExec).Scan(into...)
	if pg.HasCode(err, pg.LacksPrivilege) { // on outbox_identity it comes again
		err = q.QueryRow(ctx, selectFactsWithoutControl, pgx.QueryExecModeExec).Scan(into...)
	}
	if err != nil {
		return facts{}, fmt.Errorf("read identity of the database: %w", err)
	}
	if system != nil {
		f.recorded = &Identity{
			SystemIdentifier: *system, DatabaseOID: *oid, Timeline: *timeline,
			Environment: *environment, Addresses: addresses, RecordedAt: at,
		}
	}
	return f, nil
}

const insertIdentity = `
INSERT INTO outbox_identity (system_identifier, database_oid, timeline, environment, addresses) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT DO NOTHING`

// recordFirst records the identity of a database that has none. Of several relays that start at
// once, one does.
func recordFirst(ctx context.Context, h pg.DB, id Identity) error {
	return pg.Exec(ctx, h, "record identity of the database", insertIdentity, pgx.QueryExecModeExec, id.SystemIdentifier, id.DatabaseOID, id.Timeline, id.Environment, id.Addresses)
}

// maxAddresses bounds how many addresses are remembered; the oldest is forgotten first.
const maxAddresses = 32

const extendIdentity = `
UPDATE outbox_identity SET
    system_identifier = CASE system_identifier WHEN 0 THEN $1::bigint ELSE system_identifier END,
    timeline = CASE $3::int WHEN 0 THEN timeline ELSE $3 END,
    environment = CASE environment WHEN '' THEN $4 ELSE environment END,
    addresses = CASE WHEN $5 = ANY (addresses) THEN addresses
                     ELSE addresses[greatest(1, cardinality(addresses) - $6::int + 2):] || $5::text END
WHERE ($1::bigint = 0 OR system_identifier IN (0, $1)) AND database_oid = $2`

// recordNews adds to the identity what a relay that belongs here knows better: an address, an
// environment where none was named, the timeline after a failover.
func recordNews(ctx context.Context, h pg.DB, id Identity) error {
	return pg.Exec(ctx, h, "record news of the database", extendIdentity, pgx.QueryExecModeExec, id.SystemIdentifier, id.DatabaseOID, id.Timeline, id.Environment, id.Addresses[0], maxAddresses)
}

const selectWitness = `SELECT EXISTS (SELECT FROM outbox_relay r WHERE r.quarantined IS NULL AND (` + pg.HasSession + `
    OR r.asleep AND r.heartbeat_at > now() - interval '60 seconds' AND r.server_started_at = pg_postmaster_start_time()))`

// sessionWitnessed reports whether a relay that works has its session on this very server now.
func sessionWitnessed(ctx context.Context, q pg.DB) (found bool, err error) {
	return rows.Value[bool](ctx, q, "look for a living relay", selectWitness, pgx.QueryExecModeExec)
}

const selectHeartbeats = `SELECT id, heartbeat_at FROM outbox_relay WHERE quarantined IS NULL AND session_pid IS NULL`

// heartbeats returns when relays without a session, behind a pooler, were last heard of.
func heartbeats(ctx context.Context, q pg.DB) (map[int32]time.Time, error) {
	rows, err := q.Query(ctx, selectHeartbeats, pgx.QueryExecModeExec)
	if err != nil {
		return nil, fmt.Errorf("read heartbeats: %w", err)
	}
	all := map[int32]time.Time{}
	var relayID int32
	var at time.Time
	if _, err := pgx.ForEachRow(rows, []any{&relayID, &at}, func() error {
		all[relayID] = at
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read heartbeats: %w", err)
	}
	return all, nil
}

const selectSameDatabase = `
SELECT EXISTS (
    SELECT FROM outbox_relay r
    WHERE r.id = $1 AND r.quarantined IS NULL AND (r.session_pid IS NULL OR ` + pg.HasSession + `))`

// sameDatabase reports whether a connection leads to where this relay is registered: its session's
// server.
func sameDatabase(ctx context.Context, q pg.DB, relayID int32) (same bool, err error) {
	return rows.Value[bool](ctx, q, "compare connection with session", selectSameDatabase, pgx.QueryExecModeExec, relayID)
}

// What a transaction through a pooler begins with, in place of [pg.SetForTransaction], once the
// relay has been accepted: on another database it divides by zero, and the statements behind it are
// not run. The pooler may lead elsewhere at any time. What others may have put on the role's
// search_path matches none of it better than pg_catalog.
const setForTransactionThere = `
SELECT pg_catalog.count(pg_catalog.set_config(s.name, s.value, true))
       / (SELECT (oid::bigint = $3::bigint AND (SELECT system_identifier FROM pg_catalog.pg_control_system()) = $4::bigint)::int
          FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
FROM unnest($1::text[], $2::text[]) AS s (name, value)`

const setForTransactionThereWithoutControl = `
SELECT pg_catalog.count(pg_catalog.set_config(s.name, s.value, true))
       / (SELECT (oid::bigint = $3::bigint)::int FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
FROM unnest($1::text[], $2::text[]) AS s (name, value)`

// Explain returns what an error of these statements means: a division by zero is another database.
func Explain(err error) error {
	if pg.HasCode(err, pg.DivisionByZero) {
		return errElsewhere
	}
	return err
}

const insertQuarantined = `
INSERT INTO outbox_relay (name, version, quarantined, environment, address)
VALUES ($1, $2, $3, $4, $5) RETURNING id`

const updateQuarantined = `
UPDATE outbox_relay SET heartbeat_at = now(), quarantined = $3 WHERE id = $1 AND name = $2 AND quarantined IS NOT NULL`

// registerQuarantined shows a relay that does nothing among the relays, or continues to show it as
// relayID. It has no session, so that it works through a pooler too: only its heartbeat says that
// it lives.
func registerQuarantined(ctx context.Context, h pg.DB, relayID int32, r QuarantinedRelay, version string) (int32, error) {
	tag, err := h.Exec(ctx, updateQuarantined, pgx.QueryExecModeExec, relayID, r.Name, r.Reason)
	if err == nil && tag.RowsAffected() == 0 {
		err = h.QueryRow(ctx, insertQuarantined, pgx.QueryExecModeExec, r.Name, version, r.Reason, r.Environment, r.Address).Scan(&relayID)
	}
	if err != nil {
		return 0, fmt.Errorf("register as quarantined: %w", err)
	}
	return relayID, nil
}

const selectQuarantined = `
SELECT name, quarantined, coalesce(environment, ''), coalesce(address, '') FROM outbox_relay
WHERE quarantined IS NOT NULL AND heartbeat_at > now() - interval '10 seconds' ORDER BY id`

// quarantinedRelays lists the relays that wait for a decision.
func quarantinedRelays(ctx context.Context, q pg.DB) ([]QuarantinedRelay, error) {
	return rows.Structs[QuarantinedRelay](ctx, q, "list quarantined relays", selectQuarantined, pgx.QueryExecModeExec)
}

const selectWorking = `
SELECT r.name FROM outbox_relay r
WHERE r.quarantined IS NULL
  AND CASE WHEN r.session_pid IS NULL THEN ` + pg.IsAlive + ` ELSE ` + pg.HasSession + ` END
ORDER BY r.id`

// workingRelays names the relays that deliver from this very database.
func workingRelays(ctx context.Context, q pg.DB) ([]string, error) {
	return rows.Values[string](ctx, q, "list working relays", selectWorking, pgx.QueryExecModeExec)
}

const deleteQuarantined = `DELETE FROM outbox_relay WHERE id = $1 AND name = $2 AND quarantined IS NOT NULL`

// deregisterQuarantined removes what registerQuarantined made.
func deregisterQuarantined(ctx context.Context, h pg.DB, relayID int32, name string) error {
	return pg.Exec(ctx, h, "deregister quarantined relay", deleteQuarantined, pgx.QueryExecModeExec, relayID, name)
}

const fireQuarantined = `
INSERT INTO outbox_alert (rule, subject, first_error, detail) VALUES ('quarantined', $1, $2, $3)
ON CONFLICT (rule, subject) DO UPDATE SET
    count = outbox_alert.count + 1, last_at = now(), resolved_at = NULL, first_error = excluded.first_error, detail = excluded.detail`

// fireQuarantinedAlert opens the alert, or tells news of it.
func fireQuarantinedAlert(ctx context.Context, h pg.DB, subject, reason, detail string) error {
	return pg.Exec(ctx, h, "open alert", fireQuarantined, pgx.QueryExecModeExec, subject, reason, detail)
}

const selectEnded = `
SELECT array_agg(last_at) FROM outbox_alert
WHERE rule = 'quarantined' AND resolved_at IS NULL
  AND NOT EXISTS (SELECT FROM outbox_relay WHERE quarantined IS NOT NULL AND heartbeat_at > now() - interval '10 seconds')`

const resolveEnded = `UPDATE outbox_alert SET resolved_at = now() WHERE rule = 'quarantined' AND resolved_at IS NULL AND last_at = ANY ($1)`

// resolveQuarantinedAlerts ends the alerts once no relay is quarantined here. One that a relay
// opens, or tells again, at the same moment has another time, and stays.
func resolveQuarantinedAlerts(ctx context.Context, h pg.DB) error {
	ended, err := pg.Value[[]time.Time](ctx, h, "find alerts that have ended", selectEnded, pgx.QueryExecModeExec)
	if err != nil || len(ended) == 0 {
		return err
	}
	return pg.Exec(ctx, h, "resolve alerts", resolveEnded, pgx.QueryExecModeExec, ended)
}

const replaceIdentity = `
INSERT INTO outbox_identity (system_identifier, database_oid, timeline, environment, addresses) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (only_row) DO UPDATE SET
    system_identifier = excluded.system_identifier, database_oid = excluded.database_oid, timeline = excluded.timeline,
    environment = excluded.environment, addresses = excluded.addresses, recorded_at = now()`

// acceptIdentity makes id what relays expect.
func acceptIdentity(ctx context.Context, h pg.DB, id Identity) error {
	return pg.Exec(ctx, h, "accept identity of the database", replaceIdentity, pgx.QueryExecModeExec, id.SystemIdentifier, id.DatabaseOID, id.Timeline, id.Environment, id.Addresses)
}
