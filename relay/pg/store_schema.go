package pg

import (
	"context"
	"fmt"
	"math"

	"github.com/jackc/pgx/v5"
)

const selectSchemaVersion = `
SELECT coalesce(max(version_id), 0)
FROM (SELECT DISTINCT ON (version_id) version_id, is_applied
      FROM outbox_schema_version ORDER BY version_id, id DESC) v
WHERE is_applied`

func schemaVersion(ctx context.Context, q DB) (version int64, err error) {
	err = q.QueryRow(ctx, selectSchemaVersion).Scan(&version)
	return version, err
}

const selectLacksSchema = `SELECT to_regclass('outbox_schema_version') IS NULL`

// lacksSchema reports whether it is known that there is no schema. That a table is missing does not say so by itself: it
// may be another one, which a connection asks for before it is lent.
func lacksSchema(ctx context.Context, q DB) (lacks bool) {
	return q.QueryRow(ctx, selectLacksSchema).Scan(&lacks) == nil && lacks
}

const selectCompatibleSince = `SELECT outbox_compatible_since()`

// compatibleSince returns the oldest schema version whose builds work with the schema. One without an answer works with
// no other than its own.
func compatibleSince(ctx context.Context, q DB) (version int64, err error) {
	err = q.QueryRow(ctx, selectCompatibleSince).Scan(&version)
	if HasCode(err, undefinedFunction) {
		return math.MaxInt64, nil
	}
	return version, err
}

// The owner of the schema, the owner of the tables and superusers may create objects; migrations/roles.sql asks the same.
const selectSchemaCreators = `
SELECT pg_catalog.quote_ident(n.nspname), coalesce(pg_catalog.array_agg(DISTINCT coalesce(pg_catalog.quote_ident(r.rolname), 'PUBLIC')) FILTER (
    WHERE a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner AND r.rolsuper IS NOT TRUE AND a.grantee <> t.relowner), '{}'),
    pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(t.relowner))
FROM pg_catalog.pg_class t JOIN pg_catalog.pg_namespace n ON n.oid = t.relnamespace
LEFT JOIN LATERAL pg_catalog.aclexplode(n.nspacl) a ON true LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
WHERE t.oid = 'outbox'::regclass
GROUP BY n.nspname, t.relowner`

// FindSchemaCreators returns the schema of the outbox and the roles that may create objects in it.
func FindSchemaCreators(ctx context.Context, q DB) (c SchemaCreators, err error) {
	ctx, cancel := context.WithTimeout(ctx, StatementTimeout)
	defer cancel()
	rows, err := q.Query(ctx, selectSchemaCreators)
	if err != nil {
		return SchemaCreators{}, fmt.Errorf("find who may create objects in the schema: %w", err)
	}
	if c, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[SchemaCreators]); err != nil {
		return SchemaCreators{}, fmt.Errorf("find who may create objects in the schema: %w", err)
	}
	return c, nil
}
