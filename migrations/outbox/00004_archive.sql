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
COMMENT ON COLUMN outbox_archive.deliveries IS 'What became of the event at each destination: an array of objects; times in UTC. Fields are added, and never renamed; those without a value are left out. claim leads to the attempts of outbox_attempt.';

-- What people know of an old event is its key.
CREATE INDEX outbox_archive_key ON outbox_archive (idempotency_key);
-- An event stays in the archive for 30 days, however old it is: what was archived last is looked up before a month is dropped.
CREATE INDEX outbox_archive_archived_at ON outbox_archive (archived_at);

-- Names are found as in outbox_wake (00001_event.sql). The settings travel with each function: neither a caller's nor
-- statistics from when the tables were empty may change what it does.
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace(pg_catalog.replace($sql$

-- The archive's partitions, by what the catalogue says of them and not by their names: an operator may have made others.
CREATE FUNCTION {schema}.outbox_archive_partitions(OUT partition regclass, OUT starts timestamptz, OUT ends timestamptz)
RETURNS SETOF record LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.oid::regclass,
           coalesce(substring(b.bounds FROM 'FROM \(''([^'']+)''\)')::timestamptz, '-infinity'),
           coalesce(substring(b.bounds FROM 'TO \(''([^'']+)''\)')::timestamptz, 'infinity')
    FROM pg_namespace n JOIN pg_class a ON a.relnamespace = n.oid AND a.relname = 'outbox_archive'
    JOIN pg_inherits i ON i.inhparent = a.oid AND NOT i.inhdetachpending
    JOIN pg_class c ON c.oid = i.inhrelid, LATERAL pg_get_expr(c.relpartbound, c.oid) b (bounds)
    WHERE n.nspname = {name}
$$;

-- Looks at the next batch of events behind an id and moves those that are settled. An event is settled when it has
-- deliveries, all of them are delivered or discarded, and it and the last sign of life of each are older than asked for,
-- which is 24 hours or more.
--   mine      false: another session archives at the moment, and nothing was done
--   last_id   the last event that was examined: where the next batch begins
--   examined  how many events those were
--   finished  nothing is left to examine, or all of these are so young that what follows must be, too
--   settled   how many were settled; they are moved, unless it is a dry run
CREATE FUNCTION {schema}.outbox_archive_batch(after_id bigint, batch integer, older_than interval, dry_run boolean,
    OUT mine boolean, OUT last_id bigint, OUT examined integer, OUT finished boolean, OUT settled integer)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET TimeZone = UTC SET DateStyle = ISO SET lock_timeout = '200ms' SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
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
    -- Times, not intervals: '1 mon -30 days' compares as nothing, and may be three days of the future.
    IF (cutoff <= now() - interval '24 hours') IS NOT TRUE THEN
        RAISE EXCEPTION 'outbox: events cannot be archived after %', coalesce(older_than::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Give 24 hours or more.';
    END IF;
    examined := 0;
    settled := 0;
    last_id := after_id;
    finished := true;
    BEGIN -- a lock of the table: no role but its owner may take it
        IF NOT dry_run THEN
            LOCK TABLE ONLY {schema}.outbox_archive IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
        END IF;
        mine := true;
    EXCEPTION WHEN lock_not_available THEN
        mine := false;
    END;
    IF NOT mine THEN
        RETURN;
    END IF;

    -- An event dated into the future says nothing about those behind it; a batch of them must not end every walk.
    SELECT max(e.id), count(*), count(*) FILTER (WHERE e.created_at BETWEEN cutoff AND now()),
           array_agg(e.id) FILTER (WHERE e.created_at < cutoff)
    INTO last_id, examined, young, due
    FROM (SELECT o.id, o.created_at FROM {schema}.outbox o WHERE o.id > after_id ORDER BY o.id LIMIT batch) e;
    last_id := coalesce(last_id, after_id);
    finished := examined < batch OR young = examined;

    -- A discard leaves its time where the next attempt stood.
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
            FROM {schema}.outbox_delivery d WHERE d.event_id = e.id
        ) s
        WHERE s.deliveries > 0 AND s.all_settled AND {schema}.outbox_is_routed(e.id)
    ) c;
    IF too_much IS NOT NULL THEN
        last_id := too_much - 1;
        finished := false;
    END IF;
    settled := coalesce(cardinality(due), 0);
    IF dry_run OR settled = 0 THEN
        RETURN;
    END IF;

    -- An operator may be replaying one of them at this moment. What is locked is left out; what was changed before it
    -- could be locked is seen as it is now.
    WITH locked AS MATERIALIZED (
        SELECT d.event_id, d.status IN ('delivered', 'discarded')
                           AND greatest(d.delivered_at, d.last_attempt_at, d.next_attempt_at) < cutoff AS is_settled
        FROM {schema}.outbox_delivery d WHERE d.event_id = ANY (due) FOR UPDATE SKIP LOCKED
    )
    SELECT array_agg(l.event_id) INTO due
    FROM (SELECT event_id, count(*) FILTER (WHERE is_settled) AS ours FROM locked GROUP BY event_id) l
    WHERE l.ours = (SELECT count(*) FROM {schema}.outbox_delivery d WHERE d.event_id = l.event_id);
    settled := coalesce(cardinality(due), 0);
    IF settled = 0 THEN
        RETURN;
    END IF;

    FOR month IN SELECT DISTINCT date_trunc('month', o.created_at, 'UTC') FROM {schema}.outbox o WHERE o.id = ANY (due) LOOP
        IF NOT EXISTS (SELECT FROM {schema}.outbox_archive_partitions() p WHERE month >= p.starts AND month < p.ends) THEN
            name := 'outbox_archive_' || to_char(month, 'YYYYMM');
            WHILE to_regclass(format('%I.%I', {name}, name)) IS NOT NULL LOOP -- an operator detached that month, and keeps it
                IF length(name) = 63 THEN -- a longer one is cut off, and stands there for ever
                    RAISE EXCEPTION 'outbox: every name for the archive of % is taken', month USING ERRCODE = 'duplicate_table';
                END IF;
                name := name || '_';
            END LOOP;
            -- Not CREATE … PARTITION OF, which waits for all who read the archive, and lets others wait behind it.
            EXECUTE format('CREATE TABLE %I.%I (LIKE %1$I.outbox_archive INCLUDING ALL)', {name}, name);
            EXECUTE format('ALTER TABLE %I.outbox_archive ATTACH PARTITION %1$I.%I FOR VALUES FROM (%L) TO (%L)',
                           {name}, name, month, month + interval '1 month');
        END IF;
    END LOOP;

    -- What stands there already was put back into outbox by an operator: it keeps both histories.
    INSERT INTO {schema}.outbox_archive AS a (id, event_type, event_version, payload, idempotency_key, ordering_key,
                                     related_reference, headers, available_at, created_at, deliveries)
    SELECT o.id, o.event_type, o.event_version, o.payload, o.idempotency_key, o.ordering_key,
           o.related_reference, o.headers, o.available_at, o.created_at,
           (SELECT jsonb_agg(jsonb_strip_nulls(jsonb_build_object('destination', d.destination, 'status', d.status, 'attempts', d.attempts, 'claim', d.claim,
                       'replay', d.replay, 'last_attempt_at', d.last_attempt_at, 'delivered_at', d.delivered_at,
                       'discarded_at', CASE WHEN d.status = 'discarded' THEN d.next_attempt_at END, 'not_after', d.not_after,
                       'last_http_status', d.last_http_status, 'last_reason', d.last_reason, 'last_error', d.last_error)) ORDER BY d.destination)
            FROM {schema}.outbox_delivery d WHERE d.event_id = o.id)
    FROM {schema}.outbox o WHERE o.id = ANY (due)
    ON CONFLICT (id, created_at) DO UPDATE SET deliveries = a.deliveries || excluded.deliveries, archived_at = now();
    GET DIAGNOSTICS copied = ROW_COUNT;
    DELETE FROM {schema}.outbox_delivery d WHERE d.event_id = ANY (due);
    DELETE FROM {schema}.outbox o WHERE o.id = ANY (due);
    GET DIAGNOSTICS removed = ROW_COUNT;
    IF copied <> settled OR removed <> settled THEN
        RAISE EXCEPTION 'outbox: % events were settled, % copied and % removed; another session removes events', settled, copied, removed
            USING ERRCODE = 'serialization_failure';
    END IF;
END
$$;

-- Drops the oldest partition of the archive whose events are all older than asked for, which is 30 days or more, and into
-- which nothing was archived in the last 30 days. It returns its name; NULL: there is none. In a dry run it drops nothing and
-- returns the one that comes after the name given.
CREATE FUNCTION {schema}.outbox_drop_archive(older_than interval, dry_run boolean, after_name text)
RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET TimeZone = UTC SET DateStyle = ISO SET lock_timeout = '200ms' SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
DECLARE
    cutoff   timestamptz := now() - older_than;
    earliest timestamptz := now() - interval '720 hours';
    oldest   record;
    recent   boolean := true;
BEGIN
    IF (cutoff <= earliest) IS NOT TRUE THEN
        RAISE EXCEPTION 'outbox: events of the archive cannot be dropped after %', coalesce(older_than::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Give 30 days or more.';
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN -- it would not see what was archived since its snapshot
        RAISE EXCEPTION 'outbox: the archive is dropped in READ COMMITTED only' USING ERRCODE = 'invalid_transaction_state';
    END IF;
    IF NOT dry_run THEN -- a batch that commits while this waits for the partition would be dropped with it
        LOCK TABLE ONLY {schema}.outbox_archive IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
    END IF;
    FOR oldest IN
        SELECT p.partition::text, c.relname
        FROM {schema}.outbox_archive_partitions() p JOIN pg_class c ON c.oid = p.partition
        WHERE p.ends <= cutoff
          AND (NOT dry_run OR p.ends > coalesce((SELECT max(a.ends) FROM {schema}.outbox_archive_partitions() a
                                                   JOIN pg_class n ON n.oid = a.partition WHERE quote_ident(n.relname) = after_name), '-infinity'))
        ORDER BY p.ends
    LOOP
        -- A regclass's name is qualified and quoted as it must be.
        EXECUTE format('SELECT EXISTS (SELECT FROM %s WHERE archived_at > $1)', oldest.partition) INTO recent USING earliest;
        EXIT WHEN NOT recent;
    END LOOP;
    IF recent THEN
        RETURN NULL;
    END IF;
    IF NOT dry_run THEN
        EXECUTE 'DROP TABLE ' || oldest.partition;
    END IF;
    RETURN quote_ident(oldest.relname);
END
$$;

-- Removes old attempts from the next batch behind an id. The results and the least age are those of outbox_archive_batch. The
-- log is in the order of time, but for what a late settle mixed up: a batch that is all young ends the walk.
CREATE FUNCTION {schema}.outbox_prune_attempts(after_id bigint, batch integer, older_than interval, dry_run boolean,
    OUT mine boolean, OUT last_id bigint, OUT examined integer, OUT finished boolean, OUT removed integer)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET TimeZone = UTC SET DateStyle = ISO SET lock_timeout = '200ms' SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
DECLARE
    cutoff timestamptz := now() - older_than;
    due    bigint[];
BEGIN
    IF (cutoff <= now() - interval '24 hours') IS NOT TRUE THEN
        RAISE EXCEPTION 'outbox: attempts cannot be removed after %', coalesce(older_than::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Give 24 hours or more.';
    END IF;
    last_id := after_id;
    examined := 0;
    finished := true;
    removed := 0;
    BEGIN
        IF NOT dry_run THEN
            LOCK TABLE ONLY {schema}.outbox_archive IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
        END IF;
        mine := true;
    EXCEPTION WHEN lock_not_available THEN
        mine := false;
    END;
    IF NOT mine THEN
        RETURN;
    END IF;
    SELECT coalesce(max(e.id), after_id), count(*), array_agg(e.id) FILTER (WHERE e.started_at < cutoff)
    INTO last_id, examined, due
    FROM (SELECT a.id, a.started_at FROM {schema}.outbox_attempt a WHERE a.id > after_id ORDER BY a.id LIMIT batch) e;
    removed := coalesce(cardinality(due), 0);
    finished := examined < batch OR removed = 0;
    IF removed > 0 AND NOT dry_run THEN
        DELETE FROM {schema}.outbox_attempt a WHERE a.id = ANY (due);
    END IF;
END
$$;

-- Removes what a receiver in the same schema has finished long ago, with inbox_prune of the inbox's migrations, which bounds
-- the age. The results are those of outbox_archive_batch, with pages for events.
CREATE FUNCTION {schema}.outbox_prune_processed_events(from_page bigint, batch integer, older_than interval, dry_run boolean,
    OUT mine boolean, OUT next_page bigint, OUT examined integer, OUT finished boolean, OUT removed integer)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET TimeZone = UTC SET DateStyle = ISO SET lock_timeout = '200ms' SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
DECLARE
    tables regclass := to_regclass(format('%I.processed_events', {name}));
BEGIN
    next_page := from_page + batch;
    examined := batch;
    finished := true;
    removed := 0;
    BEGIN
        IF NOT dry_run THEN
            LOCK TABLE ONLY {schema}.outbox_archive IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
        END IF;
        mine := true;
    EXCEPTION WHEN lock_not_available THEN
        mine := false;
    END;
    IF NOT mine OR tables IS NULL THEN
        RETURN;
    END IF;
    -- Another role's function would run here with this owner's rights, and so would a trigger on its table.
    IF NOT EXISTS (
        SELECT FROM pg_class c JOIN pg_proc p ON p.pronamespace = c.relnamespace AND p.proowner = c.relowner
        WHERE c.oid = tables AND pg_get_userbyid(c.relowner) = current_user AND p.proconfig @> ARRAY['search_path=pg_catalog, pg_temp']
          AND p.oid = to_regprocedure(format('%I.inbox_prune(text, bigint, integer, interval, boolean)', {name}))
    ) THEN
        RAISE EXCEPTION 'outbox: the receiver''s tables in schema % are not those of its migrations, or do not belong to %', {name}, current_user
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'Apply the migrations of the inbox as the owner of outbox, or set retention.processed_events to 0.';
    END IF;
    SELECT (p->>'next_page')::bigint, (p->>'finished')::boolean, (p->>'removed')::integer INTO next_page, finished, removed
    FROM {schema}.inbox_prune(NULL::text, from_page, batch, older_than, dry_run) p;
END
$$;

    $sql$, '{schema}', pg_catalog.quote_ident(pg_catalog.current_schema())),
    '{name}', pg_catalog.quote_literal(pg_catalog.current_schema()));
END
$do$;
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
DROP TABLE outbox_archive;
