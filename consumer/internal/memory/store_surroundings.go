package memory

import "github.com/jackc/pgx/v5"

// Surroundings are what statements on a connection depend on beside their text, as far as handlers are known to change it. A
// multi-tenant handler sets search_path for its own statements, often for the whole session: the next event on the connection
// would be looked up, and remembered, in another schema's tables.
type Surroundings struct {
	SearchPath string
	Role       string
}

// PathAsFound, RoleAsFound and NothingHeld end the select list of the last statement before COMMIT, each of the first two before
// the number of its argument: whether the surroundings are as they were found, and no temporary table may hide one. Session locks that the handler has left
// behind are released, and the commit waits for the disk whatever the handler has set: its sender never sends the event again.
const (
	PathAsFound = `pg_catalog.current_setting('search_path') = `
	RoleAsFound = `::pg_catalog.text AND current_user = `
	NothingHeld = `::pg_catalog.text AND pg_catalog.pg_my_temp_schema() = 0, pg_catalog.pg_advisory_unlock_all(),
       CASE WHEN pg_catalog.current_setting('synchronous_commit') = 'off' THEN pg_catalog.set_config('synchronous_commit', 'on', true) END`
)

// ScanLast reads the row of a last statement: whether the connection may be another event's.
func ScanLast(row pgx.Row) (same bool, err error) {
	var counted int
	var released any // void
	var durable *string
	err = row.Scan(&counted, &same, &released, &durable)
	return same, err
}

// tidySQL finds out, after the transaction, whether the surroundings are as they were before it, and releases what session
// locks the handler has left behind. It is asked where the last statement was not, or said no: SET LOCAL ends
// with the transaction, and so do most temporary tables.
const tidySQL = `
SELECT pg_catalog.current_setting('search_path') = $1::pg_catalog.text AND current_user = $2::pg_catalog.text
       AND (pg_catalog.pg_my_temp_schema() = 0 OR NOT EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = pg_catalog.pg_my_temp_schema())),
       pg_catalog.pg_advisory_unlock_all()`

// Tidy returns tidySQL and its arguments.
func (s Surroundings) Tidy() (query string, args []any) { return tidySQL, []any{s.SearchPath, s.Role} }

// ScanTidy reads the row of tidySQL: whether the connection may be another event's.
func ScanTidy(row pgx.Row) (same bool, err error) {
	var released any // void
	err = row.Scan(&same, &released)
	return same, err
}
