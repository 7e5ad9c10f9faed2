package migrations

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// selectDependents finds what depends on the tables, functions and types of the schema of the
// version table, lies in another schema, and belongs to another role. Whoever may use the schema
// can make such objects, also temporary ones, without a right on a table.
const selectDependents = `
WITH home AS (SELECT c.relnamespace AS schema, c.relowner AS owner FROM pg_catalog.pg_class c WHERE c.oid = pg_catalog.to_regclass(pg_catalog.quote_ident($1))::pg_catalog.oid),
depends AS (
    SELECT DISTINCT CASE WHEN d.classid IN ('pg_catalog.pg_rewrite'::pg_catalog.regclass::pg_catalog.oid, 'pg_catalog.pg_attrdef'::pg_catalog.regclass::pg_catalog.oid)
                         THEN 'pg_catalog.pg_class'::pg_catalog.regclass::pg_catalog.oid ELSE d.classid END AS class,
           coalesce((SELECT r.ev_class FROM pg_catalog.pg_rewrite r WHERE d.classid = 'pg_catalog.pg_rewrite'::pg_catalog.regclass::pg_catalog.oid AND r.oid = d.objid),
                    (SELECT a.adrelid FROM pg_catalog.pg_attrdef a WHERE d.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass::pg_catalog.oid AND a.oid = d.objid), d.objid) AS object
    FROM pg_catalog.pg_depend d
    WHERE d.deptype = 'n' AND (
        d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass::pg_catalog.oid AND d.refobjid IN (SELECT c.oid FROM pg_catalog.pg_class c JOIN home ON c.relnamespace = home.schema) OR
        d.refclassid = 'pg_catalog.pg_type'::pg_catalog.regclass::pg_catalog.oid AND d.refobjid IN (SELECT t.oid FROM pg_catalog.pg_type t JOIN home ON t.typnamespace = home.schema) OR
        d.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass::pg_catalog.oid AND d.refobjid IN (SELECT p.oid FROM pg_catalog.pg_proc p JOIN home ON p.pronamespace = home.schema)))
SELECT pg_catalog.pg_describe_object(d.class, d.object, 0), pg_catalog.pg_get_userbyid(o.owner)
FROM depends d CROSS JOIN home JOIN (
    SELECT 'pg_catalog.pg_class'::pg_catalog.regclass::pg_catalog.oid AS class, c.oid AS object, c.relnamespace AS schema, c.relowner AS owner FROM pg_catalog.pg_class c
    UNION ALL SELECT 'pg_catalog.pg_type'::pg_catalog.regclass::pg_catalog.oid, t.oid, t.typnamespace, t.typowner FROM pg_catalog.pg_type t
    UNION ALL SELECT 'pg_catalog.pg_proc'::pg_catalog.regclass::pg_catalog.oid, p.oid, p.pronamespace, p.proowner FROM pg_catalog.pg_proc p
) o ON o.class = d.class AND o.object = d.object
WHERE o.schema <> home.schema AND o.owner <> home.owner
ORDER BY 2, 1 LIMIT 20`

// inTheWay says which objects of others keep a file from altering or dropping what they depend on;
// empty: this is not why it failed, or they are not found.
func (m *Migrator) inTheWay(ctx context.Context, cause error) string {
	refused := new(pgconn.PgError)
	if !errors.As(cause, &refused) || refused.Code != "2BP01" && refused.Code != "0A000" { // dependent_objects_still_exist, feature_not_supported
		return ""
	}
	rows, err := m.db.QueryContext(ctx, selectDependents, m.set.VersionTable())
	if err != nil {
		return ""
	}
	defer rows.Close()
	var all []string
	for rows.Next() {
		var object, owner string
		if rows.Scan(&object, &owner) != nil {
			return ""
		}
		all = append(all, fmt.Sprintf("%s of %s", object, owner))
	}
	if rows.Err() != nil || all == nil {
		return ""
	}
	return "; in the way are " + strings.Join(all, ", ") + ": let their owners drop them; what is temporary goes with its session (pg_stat_activity, pg_terminate_backend)"
}
