-- Least privilege. No function resolves a name through a schema in which others may create, producers choose neither id nor
-- time, and the role of the relay cannot destroy events. See docs/decisions/0038-least-privilege.md.

-- +goose Up
-- An event stays in the archive for 30 days, however old it is: what was archived last is looked up before a month is dropped.
CREATE INDEX outbox_archive_archived_at ON outbox_archive (archived_at);

-- In these functions only pg_catalog is searched for names: PostgreSQL takes the better match of two functions or operators
-- wherever on the path they are, and never looks for them in pg_temp. So the tables are qualified, with the schema that this
-- migration runs in. The DO block itself qualifies what it calls for the same reason.
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace(pg_catalog.replace($sql$

CREATE OR REPLACE FUNCTION {schema}.outbox_fan_out() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    -- Not the transaction's start: an event that becomes due long before it commits would lie behind
    -- the position from which relays claim, and wait for their next sweep.
    inserted_at timestamptz := clock_timestamp();
BEGIN
    INSERT INTO {schema}.outbox_delivery (event_id, destination, next_attempt_at, ordering_key, payload_bytes)
    SELECT DISTINCT e.id, coalesce(r.destination, ''), greatest(e.available_at, inserted_at), e.ordering_key,
           octet_length(e.payload::text)
    FROM new_event e LEFT JOIN {schema}.outbox_route r ON e.event_type LIKE r.like_pattern;

    -- FOUND: a duplicate that inserted nothing wakes no relay. A producer whose transactions are prepared (two-phase
    -- commit), where NOTIFY is not allowed, sets outbox.notify to off; relays then find its events by polling.
    IF FOUND AND coalesce(current_setting('outbox.notify', true), '') <> 'off'
       AND (SELECT last_value FROM {schema}.outbox_armed) > extract(epoch FROM inserted_at) * 1000
       -- A session that listens and never ends its transaction fills the queue, and then no COMMIT that notifies succeeds.
       AND pg_notification_queue_usage() < 0.5 THEN
        PERFORM pg_notify('outbox_wake', TG_TABLE_SCHEMA);
    END IF;
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION {schema}.outbox_route_added() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO {schema}.outbox_destination AS d (destination, parked_after)
    SELECT DISTINCT r.destination, 0::bigint FROM new_route r
    ON CONFLICT (destination) DO UPDATE SET parked_after = 0;
    RETURN NULL;
END
$$;

-- The archive's partitions, by what the catalogue says of them and not by their names: somebody may have made others.
CREATE OR REPLACE FUNCTION {schema}.outbox_archive_partitions(OUT partition regclass, OUT starts timestamptz, OUT ends timestamptz)
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
--   last_id   the last event that was looked at: where the next batch begins
--   looked_at how many events those were
--   finished  nothing is left to look at, or all of these are so young that what follows must be, too
--   settled   how many were settled; they are moved, unless it is only a rehearsal
CREATE OR REPLACE FUNCTION {schema}.outbox_archive_batch(after_id bigint, batch integer, older_than interval, rehearsal boolean,
    OUT mine boolean, OUT last_id bigint, OUT looked_at integer, OUT finished boolean, OUT settled integer)
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
    looked_at := 0;
    settled := 0;
    last_id := after_id;
    finished := true;
    BEGIN -- a lock of the table: no role but its owner may take it
        IF NOT rehearsal THEN
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
    INTO last_id, looked_at, young, due
    FROM (SELECT o.id, o.created_at FROM {schema}.outbox o WHERE o.id > after_id ORDER BY o.id LIMIT batch) e;
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
            FROM {schema}.outbox_delivery d WHERE d.event_id = e.id
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
        SELECT d.event_id, d.status FROM {schema}.outbox_delivery d WHERE d.event_id = ANY (due) FOR UPDATE SKIP LOCKED
    )
    SELECT array_agg(l.event_id) INTO due
    FROM (SELECT event_id, count(*) FILTER (WHERE status IN ('delivered', 'discarded')) AS ours FROM locked GROUP BY event_id) l
    WHERE l.ours = (SELECT count(*) FROM {schema}.outbox_delivery d WHERE d.event_id = l.event_id);
    settled := coalesce(cardinality(due), 0);
    IF settled = 0 THEN
        RETURN;
    END IF;

    FOR month IN SELECT DISTINCT date_trunc('month', o.created_at, 'UTC') FROM {schema}.outbox o WHERE o.id = ANY (due) LOOP
        IF NOT EXISTS (SELECT FROM {schema}.outbox_archive_partitions() p WHERE month >= p.starts AND month < p.ends) THEN
            name := 'outbox_archive_' || to_char(month, 'YYYYMM');
            WHILE to_regclass(format('%I.%I', {name}, name)) IS NOT NULL LOOP -- somebody detached that month, and keeps it
                IF length(name) = 63 THEN -- a longer one is cut off, and stands there for ever
                    RAISE EXCEPTION 'outbox: every name for the archive of % is taken', month USING ERRCODE = 'duplicate_table';
                END IF;
                name := name || '_';
            END LOOP;
            -- Not CREATE … PARTITION OF, which waits for everybody who reads the archive, and lets others wait behind it.
            EXECUTE format('CREATE TABLE %I.%I (LIKE %1$I.outbox_archive INCLUDING ALL)', {name}, name);
            EXECUTE format('ALTER TABLE %I.outbox_archive ATTACH PARTITION %1$I.%I FOR VALUES FROM (%L) TO (%L)',
                           {name}, name, month, month + interval '1 month');
        END IF;
    END LOOP;

    -- What stands there already was put back into outbox by somebody: it keeps both histories.
    INSERT INTO {schema}.outbox_archive AS a (id, event_type, event_version, payload, idempotency_key, ordering_key,
                                     related_reference, headers, available_at, created_at, deliveries)
    SELECT o.id, o.event_type, o.event_version, o.payload, o.idempotency_key, o.ordering_key,
           o.related_reference, o.headers, o.available_at, o.created_at,
           (SELECT jsonb_agg(to_jsonb(d) - 'event_id' ORDER BY d.destination) FROM {schema}.outbox_delivery d WHERE d.event_id = o.id)
    FROM {schema}.outbox o WHERE o.id = ANY (due)
    ON CONFLICT (id, created_at) DO UPDATE SET deliveries = a.deliveries || excluded.deliveries, archived_at = now();
    GET DIAGNOSTICS copied = ROW_COUNT;
    DELETE FROM {schema}.outbox_delivery d WHERE d.event_id = ANY (due);
    DELETE FROM {schema}.outbox o WHERE o.id = ANY (due);
    GET DIAGNOSTICS removed = ROW_COUNT;
    IF copied <> settled OR removed <> settled THEN
        RAISE EXCEPTION 'outbox: % events were settled, % copied and % removed; somebody else removes events', settled, copied, removed
            USING ERRCODE = 'serialization_failure';
    END IF;
END
$$;

-- Drops the oldest partition of the archive whose events are all older than asked for, which is 30 days or more, and into
-- which nothing was archived in the last 30 days. It returns its name; NULL: there is none. In a rehearsal it drops nothing and
-- returns the one that comes after the name given.
CREATE OR REPLACE FUNCTION {schema}.outbox_drop_archive(older_than interval, rehearsal boolean, after_name text)
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
    IF NOT rehearsal THEN -- a batch that commits while this waits for the partition would be dropped with it
        LOCK TABLE ONLY {schema}.outbox_archive IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
    END IF;
    FOR oldest IN
        SELECT p.partition::text, c.relname
        FROM {schema}.outbox_archive_partitions() p JOIN pg_class c ON c.oid = p.partition
        WHERE p.ends <= cutoff
          AND (NOT rehearsal OR p.ends > coalesce((SELECT max(a.ends) FROM {schema}.outbox_archive_partitions() a
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
    IF NOT rehearsal THEN
        EXECUTE 'DROP TABLE ' || oldest.partition;
    END IF;
    RETURN quote_ident(oldest.relname);
END
$$;

-- Removes old attempts from the next batch behind an id. The results and the least age are those of outbox_archive_batch. The
-- log is in the order of time, but for what a late settle mixed up: a batch that is all young ends the walk.
CREATE OR REPLACE FUNCTION {schema}.outbox_prune_attempts(after_id bigint, batch integer, older_than interval, rehearsal boolean,
    OUT mine boolean, OUT last_id bigint, OUT looked_at integer, OUT finished boolean, OUT removed integer)
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
    looked_at := 0;
    finished := true;
    removed := 0;
    BEGIN
        IF NOT rehearsal THEN
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
    INTO last_id, looked_at, due
    FROM (SELECT a.id, a.started_at FROM {schema}.outbox_attempt a WHERE a.id > after_id ORDER BY a.id LIMIT batch) e;
    removed := coalesce(cardinality(due), 0);
    finished := looked_at < batch OR removed = 0;
    IF removed > 0 AND NOT rehearsal THEN
        DELETE FROM {schema}.outbox_attempt a WHERE a.id = ANY (due);
    END IF;
END
$$;

-- Removes what a receiver in the same schema has finished long ago, with inbox_prune of the inbox's migrations, which bounds
-- the age. The results are those of outbox_archive_batch, with pages for events.
CREATE OR REPLACE FUNCTION {schema}.outbox_prune_processed_events(from_page bigint, batch integer, older_than interval, rehearsal boolean,
    OUT mine boolean, OUT next_page bigint, OUT looked_at integer, OUT finished boolean, OUT removed integer)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET TimeZone = UTC SET DateStyle = ISO SET lock_timeout = '200ms' SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
DECLARE
    tables regclass := to_regclass(format('%I.processed_events', {name}));
BEGIN
    next_page := from_page + batch;
    looked_at := batch;
    finished := true;
    removed := 0;
    BEGIN
        IF NOT rehearsal THEN
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
        RAISE EXCEPTION 'outbox: the receiver''s tables in schema % are not those of version 9 that belong to %', {name}, current_user
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'Apply the migrations of the inbox as the owner of outbox, or set retention.processed_events to 0.';
    END IF;
    SELECT p.next_page, p.finished, p.removed INTO next_page, finished, removed
    FROM {schema}.inbox_prune(NULL::text, from_page, batch, older_than, rehearsal) p;
END
$$;

-- Gives the next batch of events behind an id the deliveries that the trigger would have made. An event that has any
-- delivery, also a parked or discarded one, is left alone. Call it again with last_id until it is finished.
CREATE OR REPLACE FUNCTION {schema}.outbox_create_deliveries(after_id bigint DEFAULT 0, batch integer DEFAULT 10000,
    OUT last_id bigint, OUT finished boolean, OUT events integer, OUT deliveries integer)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
DECLARE
    looked_at   integer;
    missing     bigint[];
    inserted_at timestamptz := clock_timestamp();
BEGIN
    SELECT coalesce(max(e.id), after_id), count(*),
           array_agg(e.id) FILTER (WHERE NOT EXISTS (SELECT FROM {schema}.outbox_delivery d WHERE d.event_id = e.id))
    INTO last_id, looked_at, missing
    FROM (SELECT o.id FROM {schema}.outbox o WHERE o.id > after_id ORDER BY o.id LIMIT batch) e;
    finished := looked_at < batch;
    events := coalesce(cardinality(missing), 0);
    INSERT INTO {schema}.outbox_delivery (event_id, destination, next_attempt_at, ordering_key, payload_bytes)
    SELECT DISTINCT e.id, coalesce(r.destination, ''), greatest(e.available_at, inserted_at), e.ordering_key,
           octet_length(e.payload::text)
    FROM unnest(missing) m (id) CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox o WHERE o.id = m.id LIMIT 1) e
    LEFT JOIN {schema}.outbox_route r ON e.event_type LIKE r.like_pattern
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS deliveries = ROW_COUNT;
    -- They are behind later events of their ordering keys that are settled.
    INSERT INTO {schema}.outbox_destination AS t (destination, reordered)
    SELECT DISTINCT d.destination, 1::bigint FROM {schema}.outbox_delivery d
    WHERE d.event_id = ANY (missing) AND d.ordering_key IS NOT NULL AND d.destination <> '' ORDER BY 1
    ON CONFLICT (destination) DO UPDATE SET reordered = t.reordered + 1;
END
$$;

-- Gives the parked deliveries of a range of events to the destinations that they have by now, and returns how many those
-- deliveries were. A relay may neither insert nor delete a delivery. The range bounds what is read, whichever index leads to
-- it. LIMIT keeps the lookup of each event from becoming a scan of all events.
CREATE FUNCTION {schema}.outbox_release_parked(after_id bigint, last_id bigint)
RETURNS bigint LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
    WITH parked AS MATERIALIZED (
        SELECT p.event_id, e.event_type FROM {schema}.outbox_delivery p
        CROSS JOIN LATERAL (SELECT event_type FROM {schema}.outbox WHERE id = p.event_id LIMIT 1) e
        WHERE p.destination = '' AND p.status = 'pending' AND p.event_id > after_id AND p.event_id <= last_id
          AND EXISTS (SELECT FROM {schema}.outbox_route r WHERE e.event_type LIKE r.like_pattern)
        FOR UPDATE OF p
    ), gone AS (
        DELETE FROM {schema}.outbox_delivery p USING parked
        WHERE p.event_id = parked.event_id AND p.destination = ''
        RETURNING p.event_id, parked.event_type, p.next_attempt_at, p.ordering_key, p.payload_bytes
    ), routed AS (
        INSERT INTO {schema}.outbox_delivery (event_id, destination, next_attempt_at, ordering_key, payload_bytes)
        SELECT DISTINCT g.event_id, r.destination, greatest(g.next_attempt_at, now()), g.ordering_key, g.payload_bytes
        FROM gone g JOIN {schema}.outbox_route r ON g.event_type LIKE r.like_pattern
        ON CONFLICT DO NOTHING
        RETURNING destination, ordering_key
    ), reordered AS (
        INSERT INTO {schema}.outbox_destination AS d (destination, reordered)
        SELECT DISTINCT destination, 1::bigint FROM routed WHERE ordering_key IS NOT NULL ORDER BY destination
        ON CONFLICT (destination) DO UPDATE SET reordered = d.reordered + 1
    )
    SELECT count(*) FROM gone
$$;
REVOKE ALL ON FUNCTION {schema}.outbox_release_parked(bigint, bigint) FROM PUBLIC;

    $sql$, '{schema}', pg_catalog.quote_ident(pg_catalog.current_schema())),
    '{name}', pg_catalog.quote_literal(pg_catalog.current_schema()));
END
$do$;
-- +goose StatementEnd
ALTER FUNCTION outbox_refuse_update() SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION outbox_alert_changed() SET search_path = pg_catalog, pg_temp;

-- A role that may call outbox_create_deliveries may call this function, too, also where the roles are not those of roles.sql.
-- +goose StatementBegin
DO $$
DECLARE
    grantee text;
BEGIN
    FOR grantee IN
        SELECT pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(a.grantee))
        FROM pg_catalog.pg_proc p CROSS JOIN LATERAL pg_catalog.aclexplode(p.proacl) a
        WHERE p.oid OPERATOR(pg_catalog.=) 'outbox_create_deliveries(bigint, integer)'::pg_catalog.regprocedure::pg_catalog.oid
          AND a.grantee OPERATOR(pg_catalog.<>) p.proowner AND a.grantee OPERATOR(pg_catalog.<>) 0::pg_catalog.oid
    LOOP
        EXECUTE pg_catalog.concat('GRANT EXECUTE ON FUNCTION outbox_release_parked(bigint, bigint) TO ', grantee);
    END LOOP;
END
$$;
-- +goose StatementEnd

-- Commands take no id below 1, and each month becomes a partition of the archive. Both constraints are for the owner's own
-- statements: roles.sql gives producers neither column. PostgreSQL reads the CHECKs of a table anew for every statement, those
-- of a domain once for each session: this domain pays for the other constraint. It has no constraint while the column gets its
-- type, so that the table is not rewritten.
CREATE DOMAIN outbox_created_at AS timestamptz;
ALTER TABLE outbox
    ADD CONSTRAINT outbox_id_is_positive CHECK (id > 0) NOT VALID,
    DROP CONSTRAINT outbox_created_at_is_in_years_1_to_9998,
    ALTER COLUMN created_at TYPE outbox_created_at;
ALTER DOMAIN outbox_created_at ADD CONSTRAINT outbox_created_at_is_in_years_2000_to_9998
    CHECK (value >= '2000-01-01 00:00:00+00' AND value < '9999-01-01 00:00:00+00') NOT VALID;

-- +goose Down
-- The functions that were there before keep their new bodies: they work with the version before, and the old ones would let
-- others in again.
DROP FUNCTION outbox_release_parked(bigint, bigint);
DROP INDEX outbox_archive_archived_at;
ALTER TABLE outbox
    DROP CONSTRAINT outbox_id_is_positive,
    ALTER COLUMN created_at TYPE timestamptz,
    ADD CONSTRAINT outbox_created_at_is_in_years_1_to_9998
        CHECK (created_at >= '0001-01-01 00:00:00+00' AND created_at < '9999-01-01 00:00:00+00') NOT VALID;
DROP DOMAIN outbox_created_at;
