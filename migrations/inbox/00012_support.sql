-- What support needs to know of a payload: whether there is one. Only a role with SELECT on the column could ask otherwise, and
-- could read it then.

-- +goose Up
-- Reports whether an event of an inbox still has its payload; NULL: there is no such event. It runs with the rights of the tables' owner.
-- Only pg_catalog is searched for names, and the table is qualified with the schema that this migration runs in.
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.format($sql$
CREATE FUNCTION %1$I.inbox_has_payload(id bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS
$$ SELECT e.payload IS NOT NULL FROM %1$I.inbox_events e WHERE e.inbox_id = $1 $$;
REVOKE EXECUTE ON FUNCTION %1$I.inbox_has_payload(bigint) FROM PUBLIC;
    $sql$, pg_catalog.current_schema());
END
$do$;
-- +goose StatementEnd

-- Who may read the events, as a receiver does, may ask; also where roles are not those of roles.sql.
-- +goose StatementBegin
DO $$
DECLARE
    given record;
BEGIN
    FOR given IN
        SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(a.grantee)) END AS grantee
        FROM pg_catalog.pg_class c, pg_catalog.aclexplode(c.relacl) a
        WHERE c.oid = 'inbox_events'::pg_catalog.regclass AND a.grantee <> c.relowner AND a.privilege_type = 'SELECT'
    LOOP
        EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION inbox_has_payload(bigint) TO %s', given.grantee);
    END LOOP;
END
$$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION inbox_has_payload(bigint);
