package memory

import (
	"math"
	"strconv"
	"strings"
	"time"
)

// Surroundings are what statements on a connection depend on beside their text and what inbox_reset
// puts back. A multi-tenant handler sets search_path for its own statements, often for the whole
// session: the next event on the connection would be sought, and remembered, in another schema's
// tables.
type Surroundings struct {
	SearchPath string
	Role       string
	Table      string // of this package's, with its schema: that has inbox_reset, too
}

// PathLimited is search_path, once the transaction has got its limits, of which $5 says how long: a
// handler that hangs must not hold the event for ever, whether it leaves its transaction idle or
// waits for a statement without its own context. The server ends the session, or the statement. A
// shorter limit that is set already stays.
const PathLimited = `
    CASE WHEN (current_setting('idle_in_transaction_session_timeout') = '0' OR current_setting('idle_in_transaction_session_timeout')::interval > $5::text::interval)
              AND set_config('idle_in_transaction_session_timeout', $5::text, true) IS NULL THEN NULL
         WHEN (current_setting('statement_timeout') = '0' OR current_setting('statement_timeout')::interval > $5::text::interval)
              AND set_config('statement_timeout', $5::text, true) IS NULL THEN NULL
         ELSE current_setting('search_path') END`

// Limit returns $5 of [PathLimited].
func (s *Settings) Limit() string {
	return strconv.FormatInt(min((s.HandlerTimeout+s.CommitTimeout+time.Millisecond-1).Milliseconds(), math.MaxInt32), 10) + "ms"
}

// LastHead, AsFound, RoleAsFound and LastEnd make the last statement before COMMIT. It divides by
// what stands behind LastHead, and returns whether the surroundings are as they were found, with
// the numbers of their arguments before the latter two, and no temporary table may hide one.
// Session locks that the handler has left behind are released, and the commit waits for the disk
// whatever the handler has set: its sender never sends the event again. CASE keeps the order.
const (
	LastHead = `
SELECT CASE WHEN 1 / `
	AsFound = ` < 1 THEN NULL
       WHEN pg_catalog.pg_advisory_unlock_all() IS NULL THEN NULL
       WHEN pg_catalog.current_setting('synchronous_commit') = 'off' AND pg_catalog.set_config('synchronous_commit', 'on', true) IS NULL THEN NULL
       ELSE ` + nothingOpen + ` AND pg_catalog.current_setting('search_path') = `
	RoleAsFound = `::pg_catalog.text AND current_user = `
	LastEnd     = `::pg_catalog.text END`
)

// nothingTemporary is true where there is no temporary table, and nothingOpen where there is no
// cursor either. That costs more. A session that had a temporary table keeps an empty schema. The
// cursor without a name is that of the statement.
const (
	nothingTemporary = `(pg_catalog.pg_my_temp_schema() = 0::pg_catalog.oid
            OR NOT EXISTS (SELECT FROM pg_catalog.pg_class WHERE relnamespace = pg_catalog.pg_my_temp_schema()))`
	nothingOpen = nothingTemporary + ` AND NOT EXISTS (SELECT FROM pg_catalog.pg_cursors WHERE name <> ''::pg_catalog.text)`
)

// resetSQL restores the settings of the session, so that no setting of a handler reaches the next
// event. The migration of inbox_reset says how it knows them.
const resetSQL = `SELECT inbox_reset()`

// tidySQL does the same, releases what session locks the handler has left behind, and finds out
// whether the surroundings are as they were before the transaction. It is asked where the last
// statement was not, or said no: SET LOCAL ends with the transaction, and so do most temporary
// tables.
const tidySQL = `
SELECT CASE WHEN pg_catalog.pg_advisory_unlock_all() IS NULL OR inbox_reset() IS NULL THEN NULL
       ELSE pg_catalog.current_setting('search_path') = $1::pg_catalog.text AND current_user = $2::pg_catalog.text AND ` + nothingOpen + ` END`

// Tidy returns tidySQL and its arguments.
func (s Surroundings) Tidy() (query string, args []any) {
	return s.qualified(tidySQL), []any{s.SearchPath, s.Role}
}

// qualified returns query with the schema of inbox_reset: the search_path may be the handler's.
func (s Surroundings) qualified(query string) string {
	schema := s.Table[:strings.LastIndexByte(s.Table, '.')+1]
	return strings.Replace(query, "inbox_reset()", schema+"inbox_reset()", 1)
}
