package relay

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// The owner of the schema, the owner of the tables and superusers may create objects; migrations/roles.sql asks the same.
const selectSchemaCreators = `
SELECT pg_catalog.quote_ident(n.nspname), coalesce(pg_catalog.array_agg(DISTINCT coalesce(pg_catalog.quote_ident(r.rolname), 'PUBLIC')) FILTER (
    WHERE a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner AND r.rolsuper IS NOT TRUE AND a.grantee <> t.relowner), '{}'),
    pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(t.relowner))
FROM pg_catalog.pg_class t JOIN pg_catalog.pg_namespace n ON n.oid = t.relnamespace
LEFT JOIN LATERAL pg_catalog.aclexplode(n.nspacl) a ON true LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
WHERE t.oid = 'outbox'::regclass
GROUP BY n.nspname, t.relowner`

// schemaCreators returns the schema of the outbox and the roles that may create objects in it.
func schemaCreators(ctx context.Context, q querier) (c SchemaCreators, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
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
