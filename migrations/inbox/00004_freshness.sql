-- The newest version of each entity that a receiver has applied, so that a late event does not undo a newer one.
--
-- A row outlives its entity: it is what keeps a late update from bringing a deleted one back. Delete rows only of
-- entities of which no event can come any more.

-- +goose Up
CREATE TABLE inbox_freshness (
    scope      text COLLATE "C" NOT NULL,
    entity     text COLLATE "C" NOT NULL,
    -- A version is a number, or a time and what decides between equal times.
    sequence   bigint,
    at         timestamptz,
    tiebreak   bigint,
    updated_at timestamptz      NOT NULL DEFAULT now(),
    CONSTRAINT inbox_freshness_pkey PRIMARY KEY (scope, entity),
    CONSTRAINT inbox_freshness_scope_is_1_to_255_bytes CHECK (octet_length(scope) BETWEEN 1 AND 255),
    CONSTRAINT inbox_freshness_entity_is_1_to_255_bytes CHECK (octet_length(entity) BETWEEN 1 AND 255),
    -- Also what refuses to compare the one kind with the other.
    CONSTRAINT inbox_freshness_is_by_sequence_or_by_time
        CHECK ((sequence IS NULL) <> (at IS NULL) AND (at IS NULL) = (tiebreak IS NULL))
) WITH (fillfactor = 80); -- room for updates in place: no column of an index changes

COMMENT ON TABLE inbox_freshness IS 'The newest version of each entity that was applied: what comes with an older one is stale.';

-- Whoever receives needs it, also where roles are not those of roles.sql.
-- +goose StatementBegin
DO $$
DECLARE
    given record;
BEGIN
    FOR given IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee,
               string_agg(DISTINCT CASE a.privilege_type WHEN 'INSERT' THEN 'SELECT, INSERT, UPDATE' ELSE 'DELETE' END, ', ') AS privileges
        FROM pg_class c, aclexplode(c.relacl) a
        WHERE c.oid = 'processed_events'::regclass AND a.grantee <> c.relowner AND a.privilege_type IN ('INSERT', 'DELETE')
        GROUP BY a.grantee HAVING bool_or(a.privilege_type = 'INSERT')
    LOOP
        EXECUTE format('GRANT %s ON inbox_freshness TO %s', given.privileges, given.grantee);
    END LOOP;
END
$$;
-- +goose StatementEnd

-- +goose Down
DROP TABLE inbox_freshness;
