-- How a receiver forgets: what it processed long ago goes, and what is not known any more is refused and not guessed.

-- +goose Up
-- Removes what was finished, and received before a time that has been announced, from a range of the table's pages: no index
-- is in the order of time, and receivers should not pay for one. What is old enough but not announced is announced, and goes
-- when that has settled. It must be called in a transaction of its own.
--   only_receiver  NULL: of all
--   dry_run        nothing is announced or removed: it counts what would be removed, and what would have to wait
-- It returns an object, so that later versions can add to it:
--   next_page      from_page of the next call
--   finished       no page is left
--   removed        how many rows
--   announced      how many are old enough but wait for a later call
--
-- What an inbox has recorded goes when the inbox is done with it, the event first and the memory of it behind that. Where the
-- memory cannot go yet, it goes the next time: an event that is not in the inbox any more is done.
--
-- An admission looks for the event's row, and then into inbox_forgotten, and no lock makes it wait. It would find the row removed
-- and miss the announcement if its snapshot were older than that. So an announcement settles when it is a
-- minute old, longer than such a statement runs, and no session is seen with an older snapshot: above READ COMMITTED
-- one may have taken it long ago, and waited for a lock on the table since. Sessions of roles that this one may not look at
-- are not seen; for them the minute has to do. Vacuum could not use the space before that either.
--
-- Only pg_catalog is searched for names, and the tables are qualified with the schema that this migration runs in: relays call
-- this function with the rights of its owner.
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace(pg_catalog.replace($sql$
CREATE FUNCTION {schema}.inbox_prune(only_receiver text, from_page bigint, pages integer, older_than interval, dry_run boolean)
RETURNS jsonb LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET TimeZone = UTC SET lock_timeout = '200ms' SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
DECLARE
    memory    oid := format('%I.processed_events', {name})::regclass; -- part of a key's lock, as in the package consumer
    finished  boolean := from_page + pages >= pg_relation_size(memory) / current_setting('block_size')::integer;
    cutoff    timestamptz := now() - older_than;
    first_row tid := format('(%s,0)', from_page);
    end_row   tid := format('(%s,0)', from_page + pages);
    removed   integer := 0;
    announced integer := 0;
    old       record;
    mark      record;
    safe      timestamptz;
    due       tid[];
    in_inbox  tid[];
    gone      integer;
BEGIN
    -- Times, not intervals: '1 mon -29 days' compares as a day, and is none in February.
    IF (cutoff <= now() - interval '24 hours') IS NOT TRUE THEN
        RAISE EXCEPTION 'inbox: events cannot be forgotten after %', coalesce(older_than::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Give 24 hours or more.';
    END IF;
    -- Receivers and their senders in their order, so that two who prune at once do not wait for each other in a circle.
    FOR old IN
        SELECT e.receiver, e.source, max(greatest(e.since, i.processed_at)) AS latest, array_agg(e.place) AS places,
               array_agg(greatest(e.since, i.processed_at)) AS times, array_agg(i.place) AS inbox_places
        FROM (
            SELECT p.ctid AS place, p.receiver, p.source, p.idempotency_key, p.processing_state, p.not_after, greatest(p.received_at, p.processed_at) AS since
            FROM {schema}.processed_events p WHERE p.ctid >= first_row AND p.ctid < end_row
            OFFSET 0 -- or an index would do to sort by source
        ) e
        LEFT JOIN LATERAL (
            SELECT i.ctid AS place, i.processing_state, i.processed_at FROM {schema}.inbox_events i
            WHERE e.processing_state = 'recorded' AND i.receiver = e.receiver AND i.source = e.source AND i.idempotency_key = e.idempotency_key
            OFFSET 0 -- or, planned while the table is empty, all of it would be read for each of them
        ) i ON true
        WHERE e.processing_state IN ('succeeded', 'ignored', 'recorded') AND e.since < cutoff AND (e.not_after < now()) IS NOT FALSE
          AND coalesce(i.processing_state, 'succeeded') IN ('succeeded', 'ignored') AND greatest(e.since, i.processed_at) < cutoff
          AND (only_receiver IS NULL OR e.receiver = only_receiver)
        GROUP BY e.receiver, e.source ORDER BY e.receiver, e.source
    LOOP
        -- xmin is who announced. When that was two billion transactions ago it lies in the future, and its age is negative.
        SELECT f.received_before, f.removable_before,
               f.announced_at < now() - interval '1 minute' AND NOT EXISTS (
                   SELECT FROM pg_stat_activity a
                   WHERE a.datname = current_database() AND a.backend_type = 'client backend' AND a.pid <> pg_backend_pid()
                     AND age(f.xmin) BETWEEN 0 AND age(a.backend_xmin)) AS settled
        INTO mark FROM {schema}.inbox_forgotten f WHERE f.receiver = old.receiver AND f.source = old.source;
        safe := CASE WHEN mark.settled THEN mark.received_before ELSE mark.removable_before END;

        -- Never while another announcement has not settled: this one would put off what that one allows.
        IF NOT dry_run AND (mark.received_before IS NULL OR mark.settled AND old.latest >= mark.received_before) THEN
            INSERT INTO {schema}.inbox_forgotten AS f (receiver, source, received_before, announced_at)
            VALUES (old.receiver, old.source, cutoff, clock_timestamp())
            ON CONFLICT (receiver, source) DO UPDATE
            SET removable_before = f.received_before, received_before = excluded.received_before, announced_at = excluded.announced_at
            WHERE f.received_before = mark.received_before;
        END IF;

        due := ARRAY(SELECT o.place FROM unnest(old.places, old.times) o (place, since) WHERE o.since < safe);
        in_inbox := ARRAY(SELECT o.place FROM unnest(old.inbox_places, old.times) o (place, since) WHERE o.since < safe AND o.place IS NOT NULL);
        gone := cardinality(due);
        announced := announced + cardinality(old.places) - gone;
        IF NOT dry_run AND gone > 0 THEN
            -- What an operator has in hand stays, and what he has changed in the meantime, such as by a replay.
            IF cardinality(in_inbox) > 0 THEN
                DELETE FROM {schema}.inbox_events i WHERE i.ctid = ANY (ARRAY(
                    SELECT e.place
                    FROM (
                        SELECT i.ctid AS place, i.* FROM {schema}.inbox_events i WHERE i.ctid = ANY (in_inbox) FOR UPDATE SKIP LOCKED
                    ) e
                    WHERE CASE WHEN e.receiver = old.receiver AND e.source = old.source AND e.processing_state IN ('succeeded', 'ignored') -- CASE, or an index would do
                                    AND greatest(e.received_at, e.processed_at) < least(cutoff, safe) AND (e.not_after < now()) IS NOT FALSE
                          THEN true END));
            END IF;
            -- The same here. A duplicate in flight holds its key's lock (see the package consumer) and counts on the row; so
            -- that stays, too. And so does the memory of what has stayed in the inbox, which shows in a statement of its own.
            DELETE FROM {schema}.processed_events p WHERE p.ctid = ANY (ARRAY(
                SELECT e.place
                FROM (
                    SELECT p.ctid AS place, p.* FROM {schema}.processed_events p WHERE p.ctid = ANY (due) FOR UPDATE SKIP LOCKED
                ) e
                WHERE CASE WHEN e.receiver = old.receiver AND e.source = old.source AND e.processing_state IN ('succeeded', 'ignored', 'recorded')
                                AND greatest(e.received_at, e.processed_at) < least(cutoff, safe) AND (e.not_after < now()) IS NOT FALSE
                                AND NOT (e.processing_state = 'recorded' AND EXISTS (
                                    SELECT FROM {schema}.inbox_events i WHERE i.receiver = e.receiver AND i.source = e.source AND i.idempotency_key = e.idempotency_key
                                    OFFSET 0)) -- or all that is in the inbox would be read first
                      THEN pg_try_advisory_xact_lock(hashtextextended(e.receiver || E'\n' || e.source || E'\n' || e.idempotency_key, 122550254464888 # memory::bigint))
                      END));
            GET DIAGNOSTICS gone = ROW_COUNT;
        END IF;
        removed := removed + gone;
    END LOOP;
    RETURN jsonb_build_object('next_page', from_page + pages, 'finished', finished, 'removed', removed, 'announced', announced);
END
$$;
    $sql$, '{schema}', pg_catalog.quote_ident(pg_catalog.current_schema())),
    '{name}', pg_catalog.quote_literal(pg_catalog.current_schema()));
END
$do$;
-- +goose StatementEnd

-- A later migration that programs of an earlier version cannot work with replaces this function; one that only adds
-- leaves it as it is. Programs are the packages that receive, what others wrote by the statements of the documents, and the command.
CREATE FUNCTION inbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 3';
COMMENT ON FUNCTION inbox_compatible_since() IS 'The oldest schema version whose programs work with this schema.';

-- +goose Down
DROP FUNCTION inbox_compatible_since();
DROP FUNCTION inbox_prune(text, bigint, integer, interval, boolean);
