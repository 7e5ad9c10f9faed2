-- The archive: settled events with their deliveries, partitioned by the month of the event.
-- A relay may neither write nor remove events. These functions, which run with their owner's rights, are the only way in
-- which it moves them, and they decide themselves what is settled.

-- +goose Up
CREATE TABLE outbox_archive (
    id                bigint           NOT NULL,
    event_type        text COLLATE "C" NOT NULL,
    event_version     integer          NOT NULL,
    payload           json             NOT NULL,
    idempotency_key   text COLLATE "C" NOT NULL,
    ordering_key      text COLLATE "C",
    related_reference text,
    headers           jsonb            NOT NULL,
    available_at      timestamptz      NOT NULL,
    created_at        timestamptz      NOT NULL,
    archived_at       timestamptz      NOT NULL DEFAULT now(),
    deliveries        jsonb            NOT NULL,
    PRIMARY KEY (id, created_at)
) PARTITION BY RANGE (created_at);

COMMENT ON TABLE outbox_archive IS 'Settled events with their deliveries. Whole months are dropped when they have been kept long enough.';
COMMENT ON COLUMN outbox_archive.deliveries IS 'What stood in outbox_delivery: an array of objects, by destination; times in UTC.';

-- What people know of an old event is its key.
CREATE INDEX outbox_archive_key ON outbox_archive (idempotency_key);

-- Events come and go by now: vacuum after a twentieth of them, not after a fifth.
ALTER TABLE outbox SET (autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_scale_factor = 0.05);

-- The archive's partitions, by what the catalogue says of them and not by their names: somebody may have made others.
-- +goose StatementBegin
CREATE FUNCTION outbox_archive_partitions(OUT partition regclass, OUT starts timestamptz, OUT ends timestamptz)
RETURNS SETOF record LANGUAGE sql STABLE AS $$
    SELECT c.oid::regclass,
           coalesce(substring(b.bounds FROM 'FROM \(''([^'']+)''\)')::timestamptz, '-infinity'),
           coalesce(substring(b.bounds FROM 'TO \(''([^'']+)''\)')::timestamptz, 'infinity')
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid, LATERAL pg_get_expr(c.relpartbound, c.oid) b (bounds)
    WHERE i.inhparent = 'outbox_archive'::regclass AND NOT i.inhdetachpending
$$;
-- +goose StatementEnd

-- Looks at the next batch of events behind an id and moves those that are settled. An event is settled when it has
-- deliveries, all of them are delivered or discarded, and it and the last sign of life of each are older than asked for.
--   mine      false: another session archives at the moment, and nothing was done
--   last_id   the last event that was looked at: where the next batch begins
--   looked_at how many events those were
--   finished  nothing is left to look at, or all of these are so young that what follows must be, too
--   settled   how many were settled; they are moved, unless it is only a rehearsal
-- +goose StatementBegin
CREATE FUNCTION outbox_archive_batch(after_id bigint, batch integer, older_than interval, rehearsal boolean,
    OUT mine boolean, OUT last_id bigint, OUT looked_at integer, OUT finished boolean, OUT settled integer)
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    cutoff   timestamptz := now() - older_than;
    young    integer;
    due      bigint[];
    too_much bigint;
    month    timestamptz;
    name     text;
    copied   integer;
    removed  integer;
BEGIN
    looked_at := 0;
    settled := 0;
    last_id := after_id;
    finished := true;
    mine := rehearsal OR pg_try_advisory_xact_lock('outbox_archive'::regclass::oid::integer, 0);
    IF NOT mine THEN
        RETURN;
    END IF;

    -- An event dated into the future says nothing about those behind it; a batch of them must not end every walk.
    SELECT max(e.id), count(*), count(*) FILTER (WHERE e.created_at BETWEEN cutoff AND now()),
           array_agg(e.id) FILTER (WHERE e.created_at < cutoff)
    INTO last_id, looked_at, young, due
    FROM (SELECT o.id, o.created_at FROM outbox o WHERE o.id > after_id ORDER BY o.id LIMIT batch) e;
    last_id := coalesce(last_id, after_id);
    finished := looked_at < batch OR young = looked_at;

    -- Nothing says when a delivery was discarded, so that its last attempt counts, or the one that never came.
    -- A transaction moves little more than 8 MiB: events of one MiB each would keep it busy for many seconds.
    SELECT array_agg(c.id) FILTER (WHERE c.bytes_before < 8388608), min(c.id) FILTER (WHERE c.bytes_before >= 8388608)
    INTO due, too_much
    FROM (
        SELECT e.id, sum(s.bytes) OVER (ORDER BY e.id) - s.bytes AS bytes_before
        FROM unnest(due) e (id)
        CROSS JOIN LATERAL (
            SELECT count(*) AS deliveries, max(d.payload_bytes) AS bytes,
                   bool_and(d.status IN ('delivered', 'discarded')
                            AND greatest(d.delivered_at, d.last_attempt_at, d.next_attempt_at) < cutoff) AS all_settled
            FROM outbox_delivery d WHERE d.event_id = e.id
        ) s
        WHERE s.deliveries > 0 AND s.all_settled
    ) c;
    IF too_much IS NOT NULL THEN
        last_id := too_much - 1;
        finished := false;
    END IF;
    settled := coalesce(cardinality(due), 0);
    IF rehearsal OR settled = 0 THEN
        RETURN;
    END IF;

    -- An operator may be replaying one of them at this moment. What is locked is left out; what was changed before it
    -- could be locked is seen as it is now.
    WITH locked AS MATERIALIZED (
        SELECT d.event_id, d.status FROM outbox_delivery d WHERE d.event_id = ANY (due) FOR UPDATE SKIP LOCKED
    )
    SELECT array_agg(l.event_id) INTO due
    FROM (SELECT event_id, count(*) FILTER (WHERE status IN ('delivered', 'discarded')) AS ours FROM locked GROUP BY event_id) l
    WHERE l.ours = (SELECT count(*) FROM outbox_delivery d WHERE d.event_id = l.event_id);
    settled := coalesce(cardinality(due), 0);
    IF settled = 0 THEN
        RETURN;
    END IF;

    FOR month IN SELECT DISTINCT date_trunc('month', o.created_at, 'UTC') FROM outbox o WHERE o.id = ANY (due) LOOP
        IF NOT EXISTS (SELECT FROM outbox_archive_partitions() p WHERE month >= p.starts AND month < p.ends) THEN
            name := 'outbox_archive_' || to_char(month, 'YYYYMM');
            WHILE to_regclass(quote_ident(name)) IS NOT NULL LOOP -- somebody detached that month, and keeps it
                name := name || '_';
            END LOOP;
            -- Not CREATE … PARTITION OF, which waits for everybody who reads the archive, and lets others wait behind it.
            EXECUTE format('CREATE TABLE %I (LIKE outbox_archive INCLUDING ALL)', name);
            EXECUTE format('ALTER TABLE outbox_archive ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                           name, month, month + interval '1 month');
        END IF;
    END LOOP;

    -- What stands there already was put back into outbox by somebody: it keeps both histories.
    INSERT INTO outbox_archive AS a (id, event_type, event_version, payload, idempotency_key, ordering_key,
                                     related_reference, headers, available_at, created_at, deliveries)
    SELECT o.id, o.event_type, o.event_version, o.payload, o.idempotency_key, o.ordering_key,
           o.related_reference, o.headers, o.available_at, o.created_at,
           (SELECT jsonb_agg(to_jsonb(d) - 'event_id' ORDER BY d.destination) FROM outbox_delivery d WHERE d.event_id = o.id)
    FROM outbox o WHERE o.id = ANY (due)
    ON CONFLICT (id, created_at) DO UPDATE SET deliveries = a.deliveries || excluded.deliveries, archived_at = now();
    GET DIAGNOSTICS copied = ROW_COUNT;
    DELETE FROM outbox_delivery d WHERE d.event_id = ANY (due);
    DELETE FROM outbox o WHERE o.id = ANY (due);
    GET DIAGNOSTICS removed = ROW_COUNT;
    IF copied <> settled OR removed <> settled THEN
        RAISE EXCEPTION 'outbox: % events were settled, % copied and % removed; somebody else removes events', settled, copied, removed
            USING ERRCODE = 'serialization_failure';
    END IF;
END
$$;
-- +goose StatementEnd

-- Drops the oldest partition of the archive whose events are all older than asked for, and returns its name; NULL: there
-- is none. In a rehearsal it drops nothing and returns the one that comes after the name given.
-- +goose StatementBegin
CREATE FUNCTION outbox_drop_archive(older_than interval, rehearsal boolean, after_name text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    name text;
BEGIN
    IF older_than < interval '0' THEN
        RAISE EXCEPTION 'outbox: events of the archive cannot be older than %', older_than USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT p.partition::text INTO name
    FROM outbox_archive_partitions() p
    WHERE p.ends <= now() - older_than
      AND (NOT rehearsal OR p.ends > coalesce((SELECT a.ends FROM outbox_archive_partitions() a WHERE a.partition::text = after_name), '-infinity'))
    ORDER BY p.ends LIMIT 1;
    IF name IS NOT NULL AND NOT rehearsal THEN
        EXECUTE 'DROP TABLE ' || name; -- a regclass's name is quoted as it must be
    END IF;
    RETURN name;
END
$$;
-- +goose StatementEnd

-- Removes old attempts from the next batch behind an id. The results are those of outbox_archive_batch. The log is in the
-- order of time, but for what a late settle mixed up: a batch that is all young ends the walk.
-- +goose StatementBegin
CREATE FUNCTION outbox_prune_attempts(after_id bigint, batch integer, older_than interval, rehearsal boolean,
    OUT mine boolean, OUT last_id bigint, OUT looked_at integer, OUT finished boolean, OUT removed integer)
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    due bigint[];
BEGIN
    last_id := after_id;
    looked_at := 0;
    finished := true;
    removed := 0;
    mine := rehearsal OR pg_try_advisory_xact_lock('outbox_archive'::regclass::oid::integer, 0);
    IF NOT mine THEN
        RETURN;
    END IF;
    SELECT coalesce(max(e.id), after_id), count(*), array_agg(e.id) FILTER (WHERE e.started_at < now() - older_than)
    INTO last_id, looked_at, due
    FROM (SELECT a.id, a.started_at FROM outbox_attempt a WHERE a.id > after_id ORDER BY a.id LIMIT batch) e;
    removed := coalesce(cardinality(due), 0);
    finished := looked_at < batch OR removed = 0;
    IF removed > 0 AND NOT rehearsal THEN
        DELETE FROM outbox_attempt a WHERE a.id = ANY (due);
    END IF;
END
$$;
-- +goose StatementEnd

-- Removes what a receiver in the same schema has finished long ago, from a range of the table's pages: no index is in the
-- order of time. The results are those of outbox_archive_batch, with pages for events.
-- +goose StatementBegin
CREATE FUNCTION outbox_prune_processed_events(from_page bigint, batch integer, older_than interval, rehearsal boolean,
    OUT mine boolean, OUT next_page bigint, OUT looked_at integer, OUT finished boolean, OUT removed integer)
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    first_row tid := format('(%s,0)', from_page);
    end_row   tid := format('(%s,0)', from_page + batch);
    due       tid[];
BEGIN
    next_page := from_page + batch;
    looked_at := batch;
    finished := true;
    removed := 0;
    mine := rehearsal OR pg_try_advisory_xact_lock('outbox_archive'::regclass::oid::integer, 0);
    -- Qualified, or a temporary table of the caller's would do, triggers and all.
    IF NOT mine OR to_regclass(format('%I.processed_events', current_schema())) IS NULL THEN
        RETURN;
    END IF;
    finished := next_page >= pg_relation_size('processed_events') / current_setting('block_size')::integer;
    -- A duplicate in flight holds its key's lock (see the package consumer) and counts on the row; so it stays.
    SELECT array_agg(e.place) INTO due
    FROM (
        SELECT p.ctid AS place, p.source, p.idempotency_key FROM processed_events p
        WHERE p.ctid >= first_row AND p.ctid < end_row
          AND p.processing_state IN ('succeeded', 'ignored') AND greatest(p.received_at, p.processed_at) < now() - older_than
        OFFSET 0
    ) e
    WHERE rehearsal OR pg_try_advisory_xact_lock(hashtextextended(e.source || E'\n' || e.idempotency_key, 122550254464888));
    removed := coalesce(cardinality(due), 0);
    IF removed > 0 AND NOT rehearsal THEN
        DELETE FROM processed_events p
        WHERE p.ctid = ANY (due)
          AND p.processing_state IN ('succeeded', 'ignored') AND greatest(p.received_at, p.processed_at) < now() - older_than;
        GET DIAGNOSTICS removed = ROW_COUNT;
    END IF;
END
$$;
-- +goose StatementEnd

-- The settings travel with the functions: neither a caller's search_path nor his time zone, nor statistics from when the
-- tables were empty, may change what they do. A lock that does not come soon is left for another time, because others
-- would wait behind the one who waits for it.
-- +goose StatementBegin
DO $$
DECLARE
    signature text;
    setting   text;
BEGIN
    FOREACH signature IN ARRAY ARRAY [
        'outbox_archive_batch(bigint, integer, interval, boolean)', 'outbox_drop_archive(interval, boolean, text)',
        'outbox_prune_attempts(bigint, integer, interval, boolean)', 'outbox_prune_processed_events(bigint, integer, interval, boolean)'] LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = %I, pg_temp', signature, current_schema());
        FOREACH setting IN ARRAY ARRAY [
            'TimeZone = UTC', 'DateStyle = ISO', 'lock_timeout = ''200ms''',
            'enable_seqscan = off', 'enable_hashjoin = off', 'enable_mergejoin = off', 'enable_bitmapscan = off', 'jit = off'] LOOP
            EXECUTE format('ALTER FUNCTION %s SET %s', signature, setting);
        END LOOP;
    END LOOP;
END
$$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION outbox_archive_partitions(), outbox_archive_batch(bigint, integer, interval, boolean),
    outbox_drop_archive(interval, boolean, text), outbox_prune_attempts(bigint, integer, interval, boolean),
    outbox_prune_processed_events(bigint, integer, interval, boolean) FROM PUBLIC;

-- +goose Down
DROP FUNCTION outbox_prune_processed_events(bigint, integer, interval, boolean);
DROP FUNCTION outbox_prune_attempts(bigint, integer, interval, boolean);
DROP FUNCTION outbox_drop_archive(interval, boolean, text);
DROP FUNCTION outbox_archive_batch(bigint, integer, interval, boolean);
DROP FUNCTION outbox_archive_partitions();
ALTER TABLE outbox RESET (autovacuum_vacuum_scale_factor, toast.autovacuum_vacuum_scale_factor);
DROP TABLE outbox_archive;
