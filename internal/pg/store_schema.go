package pg

import (
	"context"
	"errors"
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

// A login that may create schemas can make one that is named as another login, to which "$user" of
// the search_path leads that one. It counts only if its owner is trusted: the login itself, a role
// whose rights it has, the owner of the database, or a superuser.
const selectSchema = `
SELECT n.nspname, n.nspname OPERATOR(pg_catalog.<>) CURRENT_USER OR o.rolsuper OR o.oid OPERATOR(pg_catalog.=) d.datdba
        OR o.oid OPERATOR(pg_catalog.=) me.oid OR NOT me.rolsuper AND pg_catalog.pg_has_role(me.oid, o.oid, 'USAGE'::pg_catalog.text) AS trusted,
    pg_catalog.quote_ident(o.rolname)
FROM pg_catalog.unnest(pg_catalog.current_schemas(false)) WITH ORDINALITY s (name, place)
    JOIN pg_catalog.pg_namespace n ON n.nspname OPERATOR(pg_catalog.=) s.name
    JOIN pg_catalog.pg_class c ON c.relnamespace OPERATOR(pg_catalog.=) n.oid AND c.relname OPERATOR(pg_catalog.=) $1::pg_catalog.name
    JOIN pg_catalog.pg_roles o ON o.oid OPERATOR(pg_catalog.=) n.nspowner
    JOIN pg_catalog.pg_roles me ON me.rolname OPERATOR(pg_catalog.=) CURRENT_USER
    JOIN pg_catalog.pg_database d ON d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
ORDER BY trusted DESC, s.place
LIMIT 1`

// findSchema returns the schema of the table that search_path leads to.
func findSchema(ctx context.Context, q DB, table string) (schema string, err error) {
	var trusted bool
	var owner string
	err = q.QueryRow(ctx, selectSchema, table).Scan(&schema, &trusted, &owner)
	if err == nil && !trusted {
		err = fmt.Errorf("%w: schema %q, which is named as this login, belongs to %s; name the outbox's own schema in database.schema, or drop that one",
			ErrSchema, schema, owner)
	}
	return schema, err
}

const selectLacksSchema = `SELECT to_regclass('outbox_schema_version') IS NULL`

// lacksSchema reports whether it is known that there is no schema. That a table is missing does not
// say so by itself: it may be another one, which a connection asks for before it is lent.
func lacksSchema(ctx context.Context, q DB) (lacks bool) {
	return q.QueryRow(ctx, selectLacksSchema).Scan(&lacks) == nil && lacks
}

const selectCompatibleSince = `SELECT outbox_compatible_since()`

// compatibleSince returns the oldest schema version whose builds work with the schema. One without
// an answer works with no other than its own.
func compatibleSince(ctx context.Context, q DB) (version int64, err error) {
	err = q.QueryRow(ctx, selectCompatibleSince).Scan(&version)
	if HasCode(err, undefinedFunction) {
		return math.MaxInt64, nil
	}
	return version, err
}

// $1 are the versions that are known. Of the columns, some that claims, settles and sessions need
// stand for all. A table that is absent as a whole is not counted: an operator may be about to
// bring it back.
const selectMissing = `
SELECT ARRAY(
    SELECT v::text FROM unnest($1::bigint[]) v
    WHERE (SELECT is_applied FROM outbox_schema_version WHERE version_id = v ORDER BY id DESC LIMIT 1) IS NOT TRUE ORDER BY v
), ARRAY(
    SELECT n.relation || '.' || n.name
    FROM (VALUES ('outbox', 'event_version'), ('outbox', 'related_reference'), ('outbox', 'headers'), ('outbox', 'created_at'),
                 ('outbox_delivery', 'claim'), ('outbox_delivery', 'claimed_by'), ('outbox_delivery', 'lease_expires_at'), ('outbox_delivery', 'next_attempt_at'),
                 ('outbox_delivery', 'not_after'), ('outbox_delivery', 'payload_bytes'), ('outbox_delivery', 'rescues'), ('outbox_delivery', 'replay'),
                 ('outbox_delivery', 'ordering_key'), ('outbox_delivery', 'blocked_by'), ('outbox_delivery', 'joined'), ('outbox_destination', 'paused'), ('outbox_destination', 'breaker_until'),
                 ('outbox_destination', 'breaker_events'), ('outbox_destination', 'reordered'), ('outbox_destination', 'parked_after'),
                 ('outbox_route', 'pattern'), ('outbox_attempt', 'claim'), ('outbox_attempt', 'reason')) AS n (relation, name)
    CROSS JOIN LATERAL (SELECT to_regclass(quote_ident(current_schema()) || '.' || n.relation) AS id) r
    WHERE r.id IS NOT NULL AND NOT EXISTS (SELECT FROM pg_catalog.pg_attribute a WHERE a.attrelid = r.id AND a.attname = n.name AND NOT a.attisdropped)
)`

func findMissing(ctx context.Context, q DB, known []int64) (versions, columns []string, err error) {
	if err := q.QueryRow(ctx, selectMissing, known).Scan(&versions, &columns); err != nil {
		return nil, nil, fmt.Errorf("compare the schema: %w", err)
	}
	return versions, columns, nil
}

// The owner of the schema, the owner of the tables and superusers may create objects;
// migrations/roles.sql asks the same.
const selectSchemaCreators = `
SELECT pg_catalog.quote_ident(n.nspname), coalesce(pg_catalog.array_agg(DISTINCT coalesce(pg_catalog.quote_ident(r.rolname), 'PUBLIC')) FILTER (
    WHERE a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner AND r.rolsuper IS NOT TRUE AND a.grantee <> t.relowner), '{}'),
    pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(t.relowner))
FROM pg_catalog.pg_class t JOIN pg_catalog.pg_namespace n ON n.oid = t.relnamespace
LEFT JOIN LATERAL pg_catalog.aclexplode(n.nspacl) a ON true LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
WHERE t.oid = 'outbox'::regclass
GROUP BY n.nspname, t.relowner`

// FindSchemaCreators returns the schema of the outbox and the roles that may create objects in it.
func FindSchemaCreators(ctx context.Context, q DB) (SchemaCreators, error) {
	return Struct[SchemaCreators](ctx, q, "find who may create objects in the schema", selectSchemaCreators)
}

// The login that began the session counts: it can leave any role that it has set.
const selectSuperuser = `
SELECT session_user::pg_catalog.text FROM pg_catalog.pg_roles r
WHERE r.rolname = session_user AND r.rolsuper AND EXISTS (
    SELECT FROM pg_catalog.pg_roles o CROSS JOIN pg_catalog.pg_database d
    WHERE o.rolcanlogin AND NOT o.rolsuper AND d.datname = pg_catalog.current_database() AND pg_catalog.has_database_privilege(o.oid, d.oid, 'CONNECT'))`

// CheckLogin returns an error that wraps [ErrSuperuser] if this is a superuser's login in a
// database to which other logins may connect.
func CheckLogin(ctx context.Context, q DB) error {
	login, err := Value[string](ctx, q, "check login", selectSuperuser)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("%w: %s; give the relay a login with the role outbox_relay (see: outbox-relay migrate roles), or set database.allow_superuser (OUTBOX_DATABASE_ALLOW_SUPERUSER=true)",
		ErrSuperuser, login)
}
