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
// the number of its argument: whether the surroundings are as they were found. Session locks that the handler has left behind
// are released.
const (
	PathAsFound = `pg_catalog.current_setting('search_path') = `
	RoleAsFound = `::pg_catalog.text AND current_user = `
	NothingHeld = `::pg_catalog.text, pg_catalog.pg_advisory_unlock_all()`
)

// ScanLast reads the row of a last statement: whether the connection may be another event's.
func ScanLast(row pgx.Row) (same bool, err error) {
	var counted int
	var released any // void
	err = row.Scan(&counted, &same, &released)
	return same, err
}

// tidySQL finds out, after the transaction, whether the surroundings are as they were before it, and releases what session
// locks the handler has left behind. It is asked where the last statement was not, or said no: SET LOCAL ends
// with the transaction.
const tidySQL = `
SELECT pg_catalog.current_setting('search_path') = $1::pg_catalog.text AND current_user = $2::pg_catalog.text, pg_catalog.pg_advisory_unlock_all()`

// Tidy returns tidySQL and its arguments.
func (s Surroundings) Tidy() (query string, args []any) { return tidySQL, []any{s.SearchPath, s.Role} }

// ScanTidy reads the row of tidySQL: whether the connection may be another event's.
func ScanTidy(row pgx.Row) (same bool, err error) {
	var released any // void
	err = row.Scan(&same, &released)
	return same, err
}
