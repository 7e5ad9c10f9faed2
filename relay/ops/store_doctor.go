package ops

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// serverState is what doctor asks of the server.
type serverState struct {
	Number                            int
	Version                           string
	Fsync, FullPageWrites, SyncCommit bool
	Autovacuum, InRecovery, ReadOnly  bool
	Now                               time.Time
}

const selectServerState = `
SELECT current_setting('server_version_num')::int, current_setting('server_version'), current_setting('fsync') = 'on', current_setting('full_page_writes') = 'on',
       (SELECT reset_val <> 'off' FROM pg_settings WHERE name = 'synchronous_commit'), current_setting('autovacuum') = 'on',
       pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', clock_timestamp()`

func (o *Outbox) serverState(ctx context.Context) (serverState, error) {
	states, err := collect[serverState](ctx, o.pool, "read the server's settings", selectServerState)
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
    UNION ALL
    SELECT 0, p.gid, '', extract(epoch FROM now() - p.prepared)::float8 FROM pg_prepared_xacts p
    WHERE p.database = current_database() AND p.prepared <= now() - make_interval(secs => $1)
) t ORDER BY seconds DESC LIMIT 5`

func (o *Outbox) oldTransactions(ctx context.Context, age time.Duration) ([]oldTransaction, error) {
	return collect[oldTransaction](ctx, o.pool, "look for old transactions", selectOldTransactions, age.Seconds())
}

// What a relay needs, in short: migrations/roles.sql grants it.
const selectMissingRights = `
SELECT w.privilege || ' on ' || w.name FROM (VALUES
    ('outbox', 'SELECT'), ('outbox_delivery', 'SELECT'), ('outbox_delivery', 'UPDATE'), ('outbox_attempt', 'SELECT'), ('outbox_attempt', 'INSERT'),
    ('outbox_route', 'SELECT'), ('outbox_route', 'INSERT'), ('outbox_route', 'DELETE'), ('outbox_destination', 'UPDATE'), ('outbox_identity', 'UPDATE'),
    ('outbox_relay', 'INSERT'), ('outbox_alert', 'UPDATE'), ('outbox_watch', 'UPDATE')) AS w (name, privilege)
WHERE NOT CASE WHEN w.privilege = 'DELETE' THEN has_table_privilege(w.name, w.privilege) ELSE has_any_column_privilege(w.name, w.privilege) END
ORDER BY 1`

func (o *Outbox) missingRights(ctx context.Context) ([]string, error) {
	return column[string](ctx, o, "read rights", selectMissingRights)
}

type brokenIndex struct{ Name, State string }

const selectBrokenIndexes = `
SELECT w.name, CASE WHEN i.indexrelid IS NULL THEN 'missing' ELSE 'invalid' END
FROM (VALUES ('outbox_pkey'), ('outbox_idempotency_key_is_unique'), ('outbox_delivery_pkey'), ('outbox_delivery_due'), ('outbox_delivery_order'),
             ('outbox_delivery_blocked'), ('outbox_delivery_aside'), ('outbox_attempt_claim'), ('outbox_archive_key')) AS w (name)
LEFT JOIN pg_index i ON i.indexrelid = to_regclass(w.name)
WHERE i.indexrelid IS NULL OR NOT i.indisvalid
ORDER BY 1`

func (o *Outbox) brokenIndexes(ctx context.Context) ([]brokenIndex, error) {
	return collect[brokenIndex](ctx, o.pool, "read indexes", selectBrokenIndexes)
}

const selectDisabledTriggers = `
SELECT w.name FROM (VALUES ('outbox_fan_out'), ('outbox_is_immutable')) AS w (name)
WHERE NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = 'outbox'::regclass AND t.tgname = w.name AND t.tgenabled IN ('O', 'A'))
ORDER BY 1`

func (o *Outbox) disabledTriggers(ctx context.Context) ([]string, error) {
	return column[string](ctx, o, "read triggers", selectDisabledTriggers)
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
JOIN pg_class c ON c.oid = t::regclass ORDER BY 1`

func (o *Outbox) tableHealth(ctx context.Context) ([]tableState, error) {
	return collect[tableState](ctx, o.pool, "read statistics of tables", selectTableHealth)
}

const selectRecentUndelivered = `
SELECT count(*), coalesce(min(e.id), 0) FROM (
    SELECT id FROM (SELECT id FROM outbox ORDER BY id DESC LIMIT 10000) recent
    UNION
    SELECT m.id FROM outbox_undelivered u CROSS JOIN LATERAL unnest(u.missing) AS m (id) JOIN outbox o ON o.id = m.id
) e
WHERE NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = e.id)`

// recentUndelivered counts the events without deliveries among the newest 10,000, and among those that relays have found.
func (o *Outbox) recentUndelivered(ctx context.Context) (Undelivered, error) {
	var u Undelivered
	if err := o.pool.QueryRow(ctx, selectRecentUndelivered).Scan(&u.Events, &u.FirstEventID); err != nil {
		return u, fmt.Errorf("look for events without deliveries: %w", err)
	}
	return u, nil
}

// column runs a statement of one column and returns its values.
func column[T any](ctx context.Context, o *Outbox, what, statement string) ([]T, error) {
	rows, err := o.pool.Query(ctx, statement)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	values, err := pgx.CollectRows(rows, pgx.RowTo[T])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return values, nil
}
