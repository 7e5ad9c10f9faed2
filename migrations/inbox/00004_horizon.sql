-- What the receiver may have forgotten, so that it refuses to guess.

-- +goose Up
CREATE TABLE inbox_forgotten (
    source           text COLLATE "C" PRIMARY KEY,
    received_before  timestamptz      NOT NULL,
    -- Shortly before the present received_before was committed.
    announced_at     timestamptz      NOT NULL,
    -- What stood in received_before until then: rows from before it may be removed at once.
    removable_before timestamptz      NOT NULL DEFAULT '-infinity'
);

COMMENT ON TABLE inbox_forgotten IS 'By sender: rows of processed_events that were received before this moment may be gone. Events created before it that are not known are refused.';

-- Whoever receives needs to see it, also where roles are not those of roles.sql.
-- +goose StatementBegin
DO $$
DECLARE
    given record;
BEGIN
    FOR given IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee,
               string_agg(DISTINCT CASE a.privilege_type WHEN 'INSERT' THEN 'SELECT' ELSE 'SELECT, INSERT, UPDATE' END, ', ') AS privileges
        FROM pg_class c, aclexplode(c.relacl) a
        WHERE c.oid = 'processed_events'::regclass AND a.grantee <> c.relowner AND a.privilege_type IN ('INSERT', 'DELETE')
        GROUP BY a.grantee
    LOOP
        EXECUTE format('GRANT %s ON inbox_forgotten TO %s', given.privileges, given.grantee);
    END LOOP;
END
$$;
-- +goose StatementEnd

-- +goose Down
DROP TABLE inbox_forgotten;
