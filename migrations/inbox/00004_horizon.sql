-- What the receiver may have forgotten, so that it refuses to guess.

-- +goose Up
CREATE TABLE inbox_forgotten (
    source           text COLLATE "C" PRIMARY KEY,
    received_before  timestamptz      NOT NULL,
    -- Shortly before the present received_before was committed.
    announced_at     timestamptz      NOT NULL,
    -- What stood in received_before until then. Rows from before it may be removed at once; see inbox_prune.
    removable_before timestamptz      NOT NULL DEFAULT '-infinity'
);

COMMENT ON TABLE inbox_forgotten IS 'By sender: rows of processed_events that were received before this moment may be gone. Events created before it that are not known are refused.';

-- Removes what was finished, and received before a time that has been announced, from a range of the table's pages: no index
-- is in the order of time, and receivers should not pay for one. What is old enough but not announced is announced, and goes
-- when that has settled. It must be called in a transaction of its own.
--   only_source  NULL: of every sender
--   finished     no page is left
--   removed      how many rows
--   announced    how many are old enough but have to wait
-- In a rehearsal nothing is announced or removed: it counts what would be removed, and what would have to wait.
--
-- An admission looks for the event's row and into inbox_forgotten in one statement, and no lock makes it wait. It would find
-- the row removed and miss the announcement if its snapshot were older than that. So an announcement settles when it is a
-- minute old, longer than such a statement runs, and no session is seen with an older snapshot: above READ COMMITTED
-- one may have taken it long ago, and waited for a lock on the table since. Sessions of roles that this one may not look at
-- are not seen; for them the minute has to do. Vacuum could not use the space before that either.
-- +goose StatementBegin
CREATE FUNCTION inbox_prune(only_source text, from_page bigint, pages integer, older_than interval, rehearsal boolean,
    OUT next_page bigint, OUT finished boolean, OUT removed integer, OUT announced integer)
LANGUAGE plpgsql AS $$
DECLARE
    cutoff    timestamptz := now() - older_than;
    first_row tid := format('(%s,0)', from_page);
    end_row   tid := format('(%s,0)', from_page + pages);
    old       record;
    mark      record;
    safe      timestamptz;
    due       tid[];
    gone      integer;
BEGIN
    IF older_than IS NULL OR older_than < interval '0' THEN
        RAISE EXCEPTION 'inbox: events cannot be older than %', coalesce(older_than::text, 'NULL') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    next_page := from_page + pages;
    finished := next_page >= pg_relation_size('processed_events') / current_setting('block_size')::integer;
    removed := 0;
    announced := 0;
    -- Senders in their order, so that two who prune at once do not wait for each other in a circle.
    FOR old IN
        SELECT e.source, max(e.since) AS latest, array_agg(e.place) AS places, array_agg(e.since) AS times
        FROM (
            SELECT p.ctid AS place, p.source, p.processing_state, p.not_after, greatest(p.received_at, p.processed_at) AS since
            FROM processed_events p WHERE p.ctid >= first_row AND p.ctid < end_row
            OFFSET 0 -- or an index would do to sort by source
        ) e
        WHERE e.processing_state IN ('succeeded', 'ignored') AND e.since < cutoff AND (e.not_after < now()) IS NOT FALSE
          AND (only_source IS NULL OR e.source = only_source)
        GROUP BY e.source ORDER BY e.source
    LOOP
        -- xmin is who announced. When that was two billion transactions ago it lies in the future, and its age is negative.
        SELECT f.received_before, f.removable_before,
               f.announced_at < now() - interval '1 minute' AND NOT EXISTS (
                   SELECT FROM pg_stat_activity a
                   WHERE a.datname = current_database() AND a.backend_type = 'client backend' AND a.pid <> pg_backend_pid()
                     AND age(f.xmin) BETWEEN 0 AND age(a.backend_xmin)) AS settled
        INTO mark FROM inbox_forgotten f WHERE f.source = old.source;
        safe := CASE WHEN mark.settled THEN mark.received_before ELSE mark.removable_before END;

        -- Never while another announcement has not settled: this one would put off what that one allows.
        IF NOT rehearsal AND (mark.received_before IS NULL OR mark.settled AND old.latest >= mark.received_before) THEN
            INSERT INTO inbox_forgotten AS f (source, received_before, announced_at)
            VALUES (old.source, cutoff, clock_timestamp())
            ON CONFLICT (source) DO UPDATE
            SET removable_before = f.received_before, received_before = excluded.received_before, announced_at = excluded.announced_at
            WHERE f.received_before = mark.received_before;
        END IF;

        due := ARRAY(SELECT o.place FROM unnest(old.places, old.times) o (place, since) WHERE o.since < safe);
        gone := cardinality(due);
        announced := announced + cardinality(old.places) - gone;
        IF NOT rehearsal AND gone > 0 THEN
            -- A duplicate in flight holds its key's lock (see the package consumer) and counts on the row; so it stays.
            -- So does what an operator has in hand, and what he has changed in the meantime.
            DELETE FROM processed_events p WHERE p.ctid = ANY (ARRAY(
                SELECT e.place
                FROM (
                    SELECT p.ctid AS place, p.* FROM processed_events p WHERE p.ctid = ANY (due) FOR UPDATE SKIP LOCKED
                ) e
                WHERE CASE WHEN e.source = old.source AND e.processing_state IN ('succeeded', 'ignored')
                                AND greatest(e.received_at, e.processed_at) < least(cutoff, safe) AND (e.not_after < now()) IS NOT FALSE
                      THEN pg_try_advisory_xact_lock(hashtextextended(e.source || E'\n' || e.idempotency_key, 122550254464888))
                      END));
            GET DIAGNOSTICS gone = ROW_COUNT;
        END IF;
        removed := removed + gone;
    END LOOP;
END
$$;
-- +goose StatementEnd

-- The settings travel with the function: neither a caller's search_path, nor statistics from when the tables were empty, may
-- change what it does. A lock that does not come soon is left for another time, because others would wait behind the one who
-- waits for it.
-- +goose StatementBegin
DO $$
DECLARE
    setting text;
BEGIN
    EXECUTE format('ALTER FUNCTION inbox_prune(text, bigint, integer, interval, boolean) SET search_path = %I, pg_temp', current_schema());
    FOREACH setting IN ARRAY ARRAY [
        'lock_timeout = ''200ms''', 'enable_seqscan = off', 'enable_hashjoin = off', 'enable_mergejoin = off',
        'enable_bitmapscan = off', 'jit = off'] LOOP
        EXECUTE format('ALTER FUNCTION inbox_prune(text, bigint, integer, interval, boolean) SET %s', setting);
    END LOOP;
END
$$;
-- +goose StatementEnd

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
DROP FUNCTION inbox_prune(text, bigint, integer, interval, boolean);
DROP TABLE inbox_forgotten;
