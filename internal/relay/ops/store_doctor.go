package ops

import (
	"context"
	"fmt"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/rows"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// serverState is what doctor asks of the server.
type serverState struct {
	Number                            int
	Version, Encoding                 string
	Fsync, FullPageWrites, SyncCommit bool
	Autovacuum, InRecovery, ReadOnly  bool
	Now                               time.Time
}

const selectServerState = `
SELECT current_setting('server_version_num')::int, current_setting('server_version'), current_setting('server_encoding'), current_setting('fsync') = 'on', current_setting('full_page_writes') = 'on',
       (SELECT reset_val <> 'off' FROM pg_settings WHERE name = 'synchronous_commit'), current_setting('autovacuum') = 'on',
       pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', clock_timestamp()`

func (o *Outbox) serverState(ctx context.Context) (serverState, error) {
	states, err := rows.Structs[serverState](ctx, o.pool, "read the server's settings", selectServerState)
	if err != nil {
		return serverState{}, err
	}
	return states[0], nil
}

// oldTransaction is one that holds back VACUUM.
type oldTransaction struct {
	PID         int32 // 0: a prepared one
	Name, State string
	Seconds     float64
}

const selectOldTransactions = `
SELECT * FROM (
    SELECT a.pid, coalesce(a.application_name, ''), coalesce(a.state, ''), extract(epoch FROM now() - a.xact_start)::float8 AS seconds
    FROM pg_stat_activity a
    WHERE a.datname = current_database() AND a.backend_type = 'client backend' AND a.pid <> pg_backend_pid()
      AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL) AND a.xact_start <= now() - make_interval(secs => $1)
      AND NOT (a.usename = current_user AND starts_with(a.application_name, 'outbox-relay')) -- bounded by their statement_timeout
    UNION ALL
    SELECT 0, p.gid, '', extract(epoch FROM now() - p.prepared)::float8 FROM pg_prepared_xacts p
    WHERE p.database = current_database() AND p.prepared <= now() - make_interval(secs => $1)
) t ORDER BY seconds DESC LIMIT 5`

func (o *Outbox) oldTransactions(ctx context.Context, age time.Duration) ([]oldTransaction, error) {
	return rows.Structs[oldTransaction](ctx, o.pool, "look for old transactions", selectOldTransactions, age.Seconds())
}

// tableLock is a lock on a table of the outbox that keeps relays from writing it.
type tableLock struct {
	PID         int32
	Name, State string
	Table, Mode string
	Granted     bool
	Behind      []int32 // the processes that one that waits waits for
	Seconds     float64
}

// What waits for such a lock holds up those who come after it. What relays lock, they lock briefly.
const selectTableLocks = `
SELECT l.pid, coalesce(a.application_name, ''), coalesce(a.state, ''), c.relname::text, l.mode, l.granted,
       CASE WHEN l.granted THEN '{}' ELSE pg_blocking_pids(l.pid) END, coalesce(extract(epoch FROM now() - a.xact_start), 0)::float8
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock') AND l.pid <> pg_backend_pid()
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND n.nspname = current_schema() AND c.relkind IN ('r', 'p') AND starts_with(c.relname, 'outbox')
  AND NOT coalesce(a.usename = current_user AND starts_with(a.application_name, 'outbox-relay'), false)
ORDER BY l.granted DESC, a.xact_start, c.relname LIMIT 5`

func (o *Outbox) tableLocks(ctx context.Context) ([]tableLock, error) {
	return rows.Structs[tableLock](ctx, o.pool, "look for locks", selectTableLocks)
}

// heldRole is a role of migrations/roles.sql, and what it lacks of what that script grants it.
type heldRole struct {
	// Used: it holds a right of a table here, so that the script was run. Every role has some
	// rights of functions and sequences.
	Used    bool
	Missing []string
}

// A column, if the grant is for columns. An object that is not there is no matter of rights.
const selectMissingRights = `
SELECT coalesce(bool_or(held AND kind = 'table'), false), coalesce(array_agg(DISTINCT privilege || ' on ' || name) FILTER (WHERE NOT held), '{}')
FROM (SELECT w.privilege, w.name, w.kind, CASE w.kind
        WHEN 'function' THEN has_function_privilege($1, to_regprocedure(quote_ident(current_schema()) || '.' || w.name), w.privilege)
        WHEN 'sequence' THEN has_sequence_privilege($1, to_regclass(quote_ident(current_schema()) || '.' || w.name)::oid, w.privilege)
        ELSE has_table_privilege($1, to_regclass(quote_ident(current_schema()) || '.' || w.name)::oid, w.privilege) OR w.columns <> '' AND (
            SELECT bool_and(has_column_privilege($1, to_regclass(quote_ident(current_schema()) || '.' || w.name)::oid, c, w.privilege)) FROM unnest(string_to_array(w.columns, ',')) c)
        END AS held
      FROM unnest($2::text[], $3::text[], $4::text[], $5::text[]) AS w (privilege, kind, name, columns)) g`

// missingRights compares what a role may do with what the script grants one of its roles.
func (o *Outbox) missingRights(ctx context.Context, role, template string) (heldRole, error) {
	var columns [4][]string
	for _, g := range migrations.Grants() {
		if g.Role == template {
			for i, value := range []string{g.Privilege, g.Kind, g.On, g.Columns} {
				columns[i] = append(columns[i], value)
			}
		}
	}
	held, err := rows.Structs[heldRole](ctx, o.pool, "read rights", selectMissingRights, role, columns[0], columns[1], columns[2], columns[3])
	if err != nil {
		return heldRole{}, err
	}
	return held[0], nil
}

// The names may begin with a prefix.
const selectKnownRoles = `SELECT current_user::text UNION ALL (SELECT rolname::text FROM pg_roles WHERE rolname ~ 'outbox_(producer|reader|relay)$' AND NOT rolcanlogin ORDER BY 1)`

// roles returns the own role, and those of migrations/roles.sql that there are.
func (o *Outbox) roles(ctx context.Context) ([]string, error) {
	return rows.Values[string](ctx, o.pool, "read roles", selectKnownRoles)
}

// Roles belong to the whole server: outbox_producer, with any prefix, counts here if it may insert
// here.
const selectProducers = `
SELECT DISTINCT quote_ident(r.rolname) FROM pg_roles p JOIN pg_roles r ON r.rolcanlogin AND NOT r.rolsuper AND pg_has_role(r.oid, p.oid, 'MEMBER')
WHERE p.rolname ~ 'outbox_producer$' AND NOT p.rolcanlogin AND has_any_column_privilege(p.oid, 'outbox'::regclass, 'INSERT')
  AND has_database_privilege(r.oid, (SELECT oid FROM pg_database WHERE datname = current_database()), 'CONNECT')
ORDER BY 1`

// producers returns the logins that may insert events by the role outbox_producer.
func (o *Outbox) producers(ctx context.Context) ([]string, error) {
	return rows.Values[string](ctx, o.pool, "read who may insert events", selectProducers)
}

const selectOtherSchemas = `
SELECT quote_ident(n.nspname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relname = 'outbox_schema_version' AND c.relkind = 'r' AND to_regclass('outbox_schema_version') IS NULL ORDER BY 1`

// otherSchemas returns the schemas that have an outbox, if search_path leads to none.
func (o *Outbox) otherSchemas(ctx context.Context) ([]string, error) {
	return rows.Values[string](ctx, o.pool, "look for other schemas", selectOtherSchemas)
}

// An object is one of the schema of the outbox, as the catalogue has it. That of kind schema has
// the ways in which functions name it.
type object struct {
	Kind, Name string
	State      string // what is wrong with it by itself; empty: nothing
	Calls      string // the function of a trigger
	Body       string // of a function
	Settings   []string
	Definer    bool
}

const selectObjects = `
WITH s AS (SELECT n.oid, n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = 'outbox'::regclass)
SELECT CASE c.relkind WHEN 'S' THEN 'sequence' ELSE 'table' END, c.relname::text,
       '', '', '', '{}'::text[], false
FROM s JOIN pg_class c ON c.relnamespace = s.oid WHERE c.relkind IN ('r', 'p', 'S') AND starts_with(c.relname, 'outbox')
UNION ALL SELECT 'domain', t.typname, '', '', '', '{}', false FROM s JOIN pg_type t ON t.typnamespace = s.oid WHERE t.typtype = 'd'
UNION ALL SELECT 'constraint', k.conname, CASE WHEN NOT k.convalidated THEN 'not validated' WHEN NOT i.indisvalid THEN 'invalid' ELSE '' END, '', '', '{}', false
FROM s JOIN pg_constraint k ON k.connamespace = s.oid LEFT JOIN pg_index i ON i.indexrelid = k.conindid AND k.contype IN ('p', 'u')
UNION ALL SELECT 'index', c.relname, CASE WHEN NOT i.indisvalid THEN 'invalid' ELSE '' END, '', '', '{}', false
FROM s JOIN pg_class c ON c.relnamespace = s.oid JOIN pg_index i ON i.indexrelid = c.oid
UNION ALL SELECT 'trigger', t.tgname, CASE WHEN t.tgenabled NOT IN ('O', 'A') THEN 'disabled' ELSE '' END, f.proname, '', '{}', false
FROM s JOIN pg_class c ON c.relnamespace = s.oid JOIN pg_trigger t ON t.tgrelid = c.oid JOIN pg_proc f ON f.oid = t.tgfoid
UNION ALL SELECT 'function', p.proname, CASE WHEN p.prosecdef AND p.proname <> 'outbox_wake' AND EXISTS ( -- which producers' defaults call
           SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a WHERE a.grantee = 0) THEN 'open to PUBLIC' ELSE '' END, '',
       p.prosrc, coalesce(p.proconfig, '{}'), p.prosecdef
FROM s JOIN pg_proc p ON p.pronamespace = s.oid
UNION ALL SELECT 'schema', quote_ident(nspname), quote_literal(nspname), '', '', '{}', false FROM s`

// objects returns what stands in the schema of the outbox.
func (o *Outbox) objects(ctx context.Context) ([]object, error) {
	return rows.Structs[object](ctx, o.pool, "read the catalogue", selectObjects)
}

// tableState is how well a table is vacuumed, by the server's own estimates.
type tableState struct {
	Name          string
	Live, Dead    int64
	AutovacuumOff bool
}

const selectTableHealth = `
SELECT c.relname::text, pg_stat_get_live_tuples(c.oid), pg_stat_get_dead_tuples(c.oid),
       coalesce(EXISTS (SELECT FROM pg_options_to_table(c.reloptions) o WHERE o.option_name = 'autovacuum_enabled' AND NOT o.option_value::boolean), false)
FROM unnest(ARRAY['outbox', 'outbox_delivery', 'outbox_attempt', 'outbox_destination', 'outbox_relay', 'outbox_alert']) t
JOIN pg_class c ON c.oid = (quote_ident(current_schema()) || '.' || t)::regclass ORDER BY 1`

func (o *Outbox) tableHealth(ctx context.Context) ([]tableState, error) {
	return rows.Structs[tableState](ctx, o.pool, "read statistics of tables", selectTableHealth)
}

const selectRecentUndelivered = `
WITH settled AS MATERIALIZED (` + intake.SettledSnapshot + `)
SELECT count(*), coalesce(min(e.id), 0) FROM (
    SELECT id, xid FROM (SELECT id, xid FROM outbox ORDER BY id DESC LIMIT 10000) recent
    UNION
    SELECT m.id, o.xid FROM outbox_undelivered u CROSS JOIN LATERAL unnest(u.missing) AS m (id) JOIN outbox o ON o.id = m.id
) e
WHERE pg_visible_in_snapshot(e.xid, (SELECT snapshot FROM settled)) AND NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = e.id)`

// recentUndelivered counts the events without deliveries among the newest 10,000, and among those
// that relays have found.
func (o *Outbox) recentUndelivered(ctx context.Context) (Undelivered, error) {
	var u Undelivered
	if err := o.pool.QueryRow(ctx, selectRecentUndelivered).Scan(&u.Events, &u.FirstEventID); err != nil {
		return u, fmt.Errorf("look for events without deliveries: %w", err)
	}
	return u, nil
}

// missingDeliveries are events without a delivery to a destination that those of their type before
// and after them have one to.
type missingDeliveries struct {
	Destination  string
	Events       int64
	FirstEventID int64
}

// Routes have no history: where an event should have gone is known only from others of its type.
// What was parked once has waited for a route. An event without any delivery is found by
// selectRecentUndelivered.
const selectMissingDeliveries = `
WITH settled AS MATERIALIZED (` + intake.SettledSnapshot + `), recent AS MATERIALIZED (
    SELECT id, event_type, xid FROM outbox ORDER BY id DESC LIMIT 10000
), there AS MATERIALIZED (
    SELECT e.id, e.event_type, d.destination FROM recent e CROSS JOIN LATERAL (SELECT d.destination FROM outbox_delivery d WHERE d.event_id = e.id OFFSET 0) d
), between AS MATERIALIZED (
    SELECT event_type, destination, min(id) AS first, max(id) AS last FROM there WHERE destination <> '' GROUP BY event_type, destination
)
SELECT b.destination, count(*), min(e.id)
FROM between b JOIN recent e ON e.event_type = b.event_type AND e.id > b.first AND e.id < b.last
WHERE pg_visible_in_snapshot(e.xid, (SELECT snapshot FROM settled)) AND EXISTS (SELECT FROM there t WHERE t.id = e.id)
  AND NOT EXISTS (SELECT FROM there t WHERE t.id = e.id AND t.destination IN (b.destination, ''))
GROUP BY b.destination ORDER BY b.destination LIMIT 100`

// recentMissing finds deliveries that are missing among the newest 10,000 events.
func (o *Outbox) recentMissing(ctx context.Context) ([]missingDeliveries, error) {
	return rows.Structs[missingDeliveries](ctx, o.pool, "look for missing deliveries", selectMissingDeliveries)
}

// openRange is the oldest range that has not ended.
type openRange struct {
	Seq     int64
	RelayID int32
	Name    string // of that relay; empty: it is not registered
	Alive   bool   // it has written a heartbeat lately
	Seconds float64
}

const selectOldRange = `
SELECT o.seq, o.relay_id, coalesce(r.name, ''), coalesce(` + pg.IsAlive + `, false), extract(epoch FROM now() - o.taken_at)::float8
FROM (SELECT oldest_open_seq FROM outbox_range ORDER BY seq DESC LIMIT 1) l
CROSS JOIN LATERAL (SELECT * FROM outbox_range r WHERE r.seq >= l.oldest_open_seq AND r.ended_at IS NULL ORDER BY r.seq LIMIT 1) o
LEFT JOIN outbox_relay r ON r.id = o.relay_id
WHERE o.taken_at < now() - make_interval(secs => CASE WHEN coalesce(` + pg.IsAlive + `, false) THEN $1 ELSE least($1, 10) END)`

// oldRange returns the oldest open range if it is older than that, or than ten seconds if its relay
// is not alive; at most one.
func (o *Outbox) oldRange(ctx context.Context, age time.Duration) ([]openRange, error) {
	return rows.Structs[openRange](ctx, o.pool, "look for open ranges", selectOldRange, age.Seconds())
}

const selectXidDefault = `
SELECT coalesce(pg_get_expr(d.adbin, d.adrelid), 'none') FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = 'outbox'::regclass AND a.attname = 'xid'`

// xidDefault returns the default of outbox.xid, by which relays find an event.
func (o *Outbox) xidDefault(ctx context.Context) ([]string, error) {
	return rows.Values[string](ctx, o.pool, "read the default of outbox.xid", selectXidDefault)
}
