-- Written by make schema, from the migrations of both sets, by PostgreSQL 15. To make it: outbox-relay migrate up.

CREATE DOMAIN outbox_created_at AS timestamp with time zone
	CONSTRAINT outbox_created_at_is_in_years_2000_to_9998 CHECK (((VALUE >= '2000-01-01 00:00:00+00'::timestamp with time zone) AND (VALUE < '9999-01-01 00:00:00+00'::timestamp with time zone)));

CREATE DOMAIN outbox_event_type AS text COLLATE pg_catalog."C"
	CONSTRAINT outbox_event_type_is_1_to_255_printable_ascii_no_blanks CHECK ((((octet_length(VALUE) >= 1) AND (octet_length(VALUE) <= 255)) AND (VALUE !~ '[^\x21-\x7e]'::text)));

CREATE DOMAIN outbox_idempotency_key AS text COLLATE pg_catalog."C"
	CONSTRAINT outbox_idempotency_key_is_1_to_255_printable_ascii CHECK ((((octet_length(VALUE) >= 1) AND (octet_length(VALUE) <= 255)) AND (VALUE !~ '[^\x20-\x7e]|^ | $'::text)));

CREATE FUNCTION inbox_compatible_since() RETURNS integer
    LANGUAGE sql IMMUTABLE
    AS $$SELECT 3$$;

COMMENT ON FUNCTION inbox_compatible_since() IS 'The oldest schema version whose programs work with this schema.';

CREATE FUNCTION inbox_has_payload(id bigint) RETURNS boolean
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    AS $_$ SELECT e.payload IS NOT NULL FROM inbox_events e WHERE e.inbox_id = $1 $_$;

CREATE FUNCTION inbox_prune(only_receiver text, from_page bigint, pages integer, older_than interval, dry_run boolean) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'utc'
    SET lock_timeout TO '200ms'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
DECLARE
    memory    oid := format('%I.processed_events', 'public')::regclass; -- part of a key's lock, as in the package consumer
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
            FROM processed_events p WHERE p.ctid >= first_row AND p.ctid < end_row
            OFFSET 0 -- or an index would do to sort by source
        ) e
        LEFT JOIN LATERAL (
            SELECT i.ctid AS place, i.processing_state, i.processed_at FROM inbox_events i
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
        INTO mark FROM inbox_forgotten f WHERE f.receiver = old.receiver AND f.source = old.source;
        safe := CASE WHEN mark.settled THEN mark.received_before ELSE mark.removable_before END;

        -- Never while another announcement has not settled: this one would put off what that one allows.
        IF NOT dry_run AND (mark.received_before IS NULL OR mark.settled AND old.latest >= mark.received_before) THEN
            INSERT INTO inbox_forgotten AS f (receiver, source, received_before, announced_at)
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
                DELETE FROM inbox_events i WHERE i.ctid = ANY (ARRAY(
                    SELECT e.place
                    FROM (
                        SELECT i.ctid AS place, i.* FROM inbox_events i WHERE i.ctid = ANY (in_inbox) FOR UPDATE SKIP LOCKED
                    ) e
                    WHERE CASE WHEN e.receiver = old.receiver AND e.source = old.source AND e.processing_state IN ('succeeded', 'ignored') -- CASE, or an index would do
                                    AND greatest(e.received_at, e.processed_at) < least(cutoff, safe) AND (e.not_after < now()) IS NOT FALSE
                          THEN true END));
            END IF;
            -- The same here. A duplicate in flight holds its key's lock (see the package consumer) and counts on the row; so
            -- that stays, too. And so does the memory of what has stayed in the inbox, which shows in a statement of its own.
            DELETE FROM processed_events p WHERE p.ctid = ANY (ARRAY(
                SELECT e.place
                FROM (
                    SELECT p.ctid AS place, p.* FROM processed_events p WHERE p.ctid = ANY (due) FOR UPDATE SKIP LOCKED
                ) e
                WHERE CASE WHEN e.receiver = old.receiver AND e.source = old.source AND e.processing_state IN ('succeeded', 'ignored', 'recorded')
                                AND greatest(e.received_at, e.processed_at) < least(cutoff, safe) AND (e.not_after < now()) IS NOT FALSE
                                AND NOT (e.processing_state = 'recorded' AND EXISTS (
                                    SELECT FROM inbox_events i WHERE i.receiver = e.receiver AND i.source = e.source AND i.idempotency_key = e.idempotency_key
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

CREATE FUNCTION inbox_reset() RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    own pg_catalog.text := pg_catalog.current_setting('outbox_relay.session', true);
BEGIN
    IF pg_catalog.length(own) OPERATOR(pg_catalog.>) 0 THEN
        RESET ALL;
        IF pg_catalog.length(own) OPERATOR(pg_catalog.>) 2 THEN
            PERFORM pg_catalog.set_config(s.key, s.value, false) FROM pg_catalog.json_each_text(own::pg_catalog.json) s;
        END IF;
    ELSE
        SELECT coalesce(pg_catalog.json_object_agg(s.name, s.setting)::pg_catalog.text, '{}') INTO own FROM pg_catalog.pg_settings s
        WHERE s.source OPERATOR(pg_catalog.=) 'session' AND s.name OPERATOR(pg_catalog.!~) '^(transaction_|outbox_relay\.)';
    END IF;
    RETURN pg_catalog.set_config('outbox_relay.session', own, false) IS NOT NULL;
END
$$;

CREATE FUNCTION outbox_alert_changed() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF OLD.resolved_at IS NOT NULL AND (NEW.resolved_at IS NULL OR NEW.count > OLD.count) THEN -- it returns
        NEW.count := greatest(NEW.count, OLD.count + 1);
        NEW.counted_before := OLD.count;
        NEW.opened_at := greatest(OLD.resolved_at, CASE WHEN NEW.opened_at = OLD.opened_at THEN now() ELSE NEW.opened_at END);
        NEW.resolved_at := NULL;
        NEW.returned := OLD.returned + 1;
        NEW.acknowledged_by := NULL;
        NEW.due_at := now();
    ELSIF NEW.resolved_at IS NOT NULL AND OLD.resolved_at IS NULL THEN
        NEW.due_at := now();
    END IF;
    RETURN NEW;
END
$$;

CREATE FUNCTION outbox_archive_batch(after_id bigint, batch integer, older_than interval, dry_run boolean, OUT mine boolean, OUT last_id bigint, OUT examined integer, OUT finished boolean, OUT settled integer) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'utc'
    SET "DateStyle" TO 'iso'
    SET lock_timeout TO '200ms'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $_$
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
            LOCK TABLE ONLY outbox_archive IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
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
    FROM (SELECT o.id, o.created_at FROM outbox o WHERE o.id > after_id ORDER BY o.id LIMIT batch) e;
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
            FROM outbox_delivery d WHERE d.event_id = e.id
        ) s
        WHERE s.deliveries > 0 AND s.all_settled AND outbox_is_routed(e.id)
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
        FROM outbox_delivery d WHERE d.event_id = ANY (due) FOR UPDATE SKIP LOCKED
    )
    SELECT array_agg(l.event_id) INTO due
    FROM (SELECT event_id, count(*) FILTER (WHERE is_settled) AS ours FROM locked GROUP BY event_id) l
    WHERE l.ours = (SELECT count(*) FROM outbox_delivery d WHERE d.event_id = l.event_id);
    settled := coalesce(cardinality(due), 0);
    IF settled = 0 THEN
        RETURN;
    END IF;

    FOR month IN SELECT DISTINCT date_trunc('month', o.created_at, 'UTC') FROM outbox o WHERE o.id = ANY (due) LOOP
        IF NOT EXISTS (SELECT FROM outbox_archive_partitions() p WHERE month >= p.starts AND month < p.ends) THEN
            name := 'outbox_archive_' || to_char(month, 'YYYYMM');
            WHILE to_regclass(format('%I.%I', 'public', name)) IS NOT NULL LOOP -- an operator detached that month, and keeps it
                IF length(name) = 63 THEN -- a longer one is cut off, and stands there for ever
                    RAISE EXCEPTION 'outbox: every name for the archive of % is taken', month USING ERRCODE = 'duplicate_table';
                END IF;
                name := name || '_';
            END LOOP;
            -- Not CREATE … PARTITION OF, which waits for all who read the archive, and lets others wait behind it.
            EXECUTE format('CREATE TABLE %I.%I (LIKE %1$I.outbox_archive INCLUDING ALL)', 'public', name);
            EXECUTE format('ALTER TABLE %I.outbox_archive ATTACH PARTITION %1$I.%I FOR VALUES FROM (%L) TO (%L)',
                           'public', name, month, month + interval '1 month');
        END IF;
    END LOOP;

    -- What stands there already was put back into outbox by an operator: it keeps both histories.
    INSERT INTO outbox_archive AS a (id, event_type, event_version, payload, idempotency_key, ordering_key,
                                     related_reference, headers, available_at, created_at, deliveries)
    SELECT o.id, o.event_type, o.event_version, o.payload, o.idempotency_key, o.ordering_key,
           o.related_reference, o.headers, o.available_at, o.created_at,
           (SELECT jsonb_agg(jsonb_strip_nulls(jsonb_build_object('destination', d.destination, 'status', d.status, 'attempts', d.attempts, 'claim', d.claim,
                       'replay', d.replay, 'last_attempt_at', d.last_attempt_at, 'delivered_at', d.delivered_at,
                       'discarded_at', CASE WHEN d.status = 'discarded' THEN d.next_attempt_at END, 'not_after', d.not_after,
                       'last_http_status', d.last_http_status, 'last_reason', d.last_reason, 'last_error', d.last_error)) ORDER BY d.destination)
            FROM outbox_delivery d WHERE d.event_id = o.id)
    FROM outbox o WHERE o.id = ANY (due)
    ON CONFLICT (id, created_at) DO UPDATE SET deliveries = a.deliveries || excluded.deliveries, archived_at = now();
    GET DIAGNOSTICS copied = ROW_COUNT;
    DELETE FROM outbox_delivery d WHERE d.event_id = ANY (due);
    DELETE FROM outbox o WHERE o.id = ANY (due);
    GET DIAGNOSTICS removed = ROW_COUNT;
    IF copied <> settled OR removed <> settled THEN
        RAISE EXCEPTION 'outbox: % events were settled, % copied and % removed; another session removes events', settled, copied, removed
            USING ERRCODE = 'serialization_failure';
    END IF;
END
$_$;

CREATE FUNCTION outbox_archive_partitions(OUT partition regclass, OUT starts timestamp with time zone, OUT ends timestamp with time zone) RETURNS SETOF record
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT c.oid::regclass,
           coalesce(substring(b.bounds FROM 'FROM \(''([^'']+)''\)')::timestamptz, '-infinity'),
           coalesce(substring(b.bounds FROM 'TO \(''([^'']+)''\)')::timestamptz, 'infinity')
    FROM pg_namespace n JOIN pg_class a ON a.relnamespace = n.oid AND a.relname = 'outbox_archive'
    JOIN pg_inherits i ON i.inhparent = a.oid AND NOT i.inhdetachpending
    JOIN pg_class c ON c.oid = i.inhrelid, LATERAL pg_get_expr(c.relpartbound, c.oid) b (bounds)
    WHERE n.nspname = 'public'
$$;

CREATE FUNCTION outbox_compare_events(types text[], versions integer[], payloads json[], keys text[], orderings text[], related text[], header_sets jsonb[], OUT number bigint, OUT found boolean, OUT written_by bigint, OUT differs text) RETURNS SETOF record
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT e.number - 1, o.id IS NOT NULL,
           CASE WHEN o.xmin IN (SELECT transactionid FROM pg_locks WHERE locktype = 'transactionid' AND pid = pg_backend_pid())
                THEN o.cmin::text::bigint ELSE -1 END,
           concat_ws(',', CASE WHEN o.event_type <> e.event_type THEN 'event_type' END,
                          CASE WHEN o.event_version <> e.event_version THEN 'event_version' END,
                          CASE WHEN o.payload::text <> e.payload::text THEN 'payload' END,
                          CASE WHEN o.ordering_key IS DISTINCT FROM e.ordering_key THEN 'ordering_key' END,
                          CASE WHEN o.related_reference IS DISTINCT FROM e.related_reference THEN 'related_reference' END,
                          CASE WHEN (SELECT jsonb_object_agg(key, value) FROM jsonb_each(o.headers)
                                     WHERE lower(key) NOT IN ('traceparent', 'tracestate', 'baggage'))
                                    IS DISTINCT FROM
                                    (SELECT jsonb_object_agg(key, value) FROM jsonb_each(e.headers)
                                     WHERE lower(key) NOT IN ('traceparent', 'tracestate', 'baggage'))
                               THEN 'headers' END)
    FROM unnest(types, versions, payloads, keys, orderings, related, header_sets) WITH ORDINALITY
         AS e (event_type, event_version, payload, idempotency_key, ordering_key, related_reference, headers, number)
    LEFT JOIN outbox o ON o.idempotency_key = e.idempotency_key
    ORDER BY e.number
$$;

COMMENT ON FUNCTION outbox_compare_events(types text[], versions integer[], payloads json[], keys text[], orderings text[], related text[], header_sets jsonb[], OUT number bigint, OUT found boolean, OUT written_by bigint, OUT differs text) IS 'Compares events with those that hold their idempotency keys. Producers of every age call it, so its parameters and results never change: a further column of the content needs a second function.';

CREATE FUNCTION outbox_compatible_since() RETURNS integer
    LANGUAGE sql IMMUTABLE
    AS $$SELECT 6$$;

COMMENT ON FUNCTION outbox_compatible_since() IS 'The oldest schema version whose programs work with this schema.';

CREATE FUNCTION outbox_count_change() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF TG_TABLE_NAME = 'outbox_route' THEN
        UPDATE outbox_intake SET routes = routes + 1;
    ELSE
        UPDATE outbox_intake SET destinations = destinations + 1;
    END IF;
    RETURN NULL;
END
$$;

CREATE FUNCTION outbox_cover_events(after_id bigint, batch integer, since pg_snapshot, OUT last_id bigint, OUT finished boolean, OUT deliveries bigint) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
DECLARE
    -- All events that are visible in it are settled.
    settled     pg_snapshot;
    inserted_at timestamptz := clock_timestamp();
BEGIN
    SELECT coalesce((SELECT o.base FROM outbox_range o WHERE o.seq >= l.oldest_open_seq AND o.ended_at IS NULL ORDER BY o.seq LIMIT 1),
                    CASE WHEN l.more THEN l.base ELSE l.target END)
    INTO settled FROM (SELECT * FROM outbox_range ORDER BY seq DESC LIMIT 1) l;
    SELECT coalesce(max(e.id), after_id), count(*) < batch INTO last_id, finished
    FROM (SELECT o.id FROM outbox o WHERE o.id > after_id ORDER BY o.id LIMIT batch) e;
    WITH covered AS (
        INSERT INTO outbox_delivery (event_id, destination, joined, next_attempt_at, ordering_key, payload_bytes)
        SELECT DISTINCT ON (e.id, r.destination) e.id, coalesce(r.destination, ''), CASE WHEN k.key IS NULL OR e.available_at <= inserted_at THEN 0 END,
               greatest(e.available_at, inserted_at), k.key, octet_length(e.payload::text)
        FROM outbox e CROSS JOIN LATERAL (SELECT CASE WHEN octet_length(e.ordering_key) <= 255 THEN e.ordering_key END AS key) k
        LEFT JOIN outbox_route r ON e.event_type LIKE r.like_pattern
        WHERE e.id > after_id AND e.id <= last_id
          AND (NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = e.id)
               OR r.destination IS NOT NULL AND NOT pg_visible_in_snapshot(e.xid, settled))
        ON CONFLICT DO NOTHING
        RETURNING destination, ordering_key
    ), reordered AS (
        INSERT INTO outbox_destination AS t (destination, reordered)
        SELECT DISTINCT c.destination, 1::bigint FROM covered c WHERE c.ordering_key IS NOT NULL AND c.destination <> '' ORDER BY 1
        ON CONFLICT (destination) DO UPDATE SET reordered = t.reordered + 1
    )
    SELECT count(*) INTO deliveries FROM covered;
    -- What was committed since the statement before has no delivery, and a transaction id of this server: a take finds it.
    UPDATE outbox o SET xid = '2'
    WHERE id > after_id AND id <= last_id AND NOT pg_visible_in_snapshot(xid, since)
      AND EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = o.id);
    -- Logical replication copies events, and not the sequence of their ids. Other transactions may take ids meanwhile: a gap is
    -- harmless.
    IF finished AND last_id >= (SELECT last_value + is_called::integer FROM outbox_id_seq) THEN
        PERFORM setval(format('%I.outbox_id_seq', 'public'), last_id + 10000);
    END IF;
END
$$;

CREATE FUNCTION outbox_create_deliveries(after_id bigint DEFAULT 0, batch integer DEFAULT 10000, OUT last_id bigint, OUT finished boolean, OUT events integer, OUT deliveries integer) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
DECLARE
    examined    integer;
    missing     bigint[];
    inserted_at timestamptz := clock_timestamp();
BEGIN
    SELECT coalesce(max(e.id), after_id), count(*),
           array_agg(e.id) FILTER (WHERE NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = e.id) AND outbox_is_routed(e.id))
    INTO last_id, examined, missing
    FROM (SELECT o.id FROM outbox o WHERE o.id > after_id ORDER BY o.id LIMIT batch) e;
    finished := examined < batch;
    events := coalesce(cardinality(missing), 0);
    INSERT INTO outbox_delivery (event_id, destination, joined, next_attempt_at, ordering_key, payload_bytes)
    SELECT DISTINCT e.id, coalesce(r.destination, ''), CASE WHEN k.key IS NULL OR e.available_at <= inserted_at THEN 0 END,
           greatest(e.available_at, inserted_at), k.key, octet_length(e.payload::text)
    FROM unnest(missing) m (id) CROSS JOIN LATERAL (SELECT * FROM outbox o WHERE o.id = m.id LIMIT 1) e
    CROSS JOIN LATERAL (SELECT CASE WHEN octet_length(e.ordering_key) <= 255 THEN e.ordering_key END AS key) k
    LEFT JOIN outbox_route r ON e.event_type LIKE r.like_pattern
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS deliveries = ROW_COUNT;
    -- They are behind later events of their ordering keys that are settled.
    INSERT INTO outbox_destination AS t (destination, reordered)
    SELECT DISTINCT d.destination, 1::bigint FROM outbox_delivery d
    WHERE d.event_id = ANY (missing) AND d.ordering_key IS NOT NULL AND d.destination <> '' ORDER BY 1
    ON CONFLICT (destination) DO UPDATE SET reordered = t.reordered + 1;
END
$$;

CREATE FUNCTION outbox_drop_archive(older_than interval, dry_run boolean, after_name text) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'utc'
    SET "DateStyle" TO 'iso'
    SET lock_timeout TO '200ms'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $_$
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
        LOCK TABLE ONLY outbox_archive IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
    END IF;
    FOR oldest IN
        SELECT p.partition::text, c.relname
        FROM outbox_archive_partitions() p JOIN pg_class c ON c.oid = p.partition
        WHERE p.ends <= cutoff
          AND (NOT dry_run OR p.ends > coalesce((SELECT max(a.ends) FROM outbox_archive_partitions() a
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
$_$;

CREATE FUNCTION outbox_is_routed(event_id bigint) RETURNS boolean
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT pg_visible_in_snapshot(
        (SELECT o.xid FROM outbox o WHERE o.id = event_id LIMIT 1),
        (SELECT coalesce((SELECT o.base FROM outbox_range o WHERE o.seq >= l.oldest_open_seq AND o.ended_at IS NULL ORDER BY o.seq LIMIT 1),
                         CASE WHEN l.more THEN l.base ELSE l.target END)
         FROM (SELECT * FROM outbox_range ORDER BY seq DESC LIMIT 1) l))
$$;

CREATE FUNCTION outbox_keep_audit() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF OLD.state = 'done' -- which nothing goes on with
       OR OLD.state <> 'running' AND (NEW.state <> 'running' OR NEW.done <> OLD.done) -- an operation that ended can go on, and changes nothing before
       OR NEW.done < OLD.done OR NEW.updated_at < OLD.updated_at
       OR (NEW.id, NEW.at, NEW.actor, NEW.origin, NEW.action, NEW.destination, NEW.event_id, NEW.selection, NEW.matched)
          IS DISTINCT FROM (OLD.id, OLD.at, OLD.actor, OLD.origin, OLD.action, OLD.destination, OLD.event_id, OLD.selection, OLD.matched) THEN
        RAISE EXCEPTION 'outbox_audit: entry % is kept as it was written', OLD.id
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$$;

CREATE FUNCTION outbox_order_reveal(event bigint, actor text, origin text) RETURNS bigint
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    INSERT INTO outbox_audit (actor, origin, action, event_id, detail)
    VALUES (coalesce(nullif(actor, ''), session_user::text), origin, 'reveal_payload', event, 'login ' || session_user::text)
    RETURNING id
$$;

CREATE FUNCTION outbox_outline(event bigint, OUT payload_bytes integer, OUT header_names text[]) RETURNS SETOF record
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT octet_length(e.payload::text), ARRAY (SELECT jsonb_object_keys(e.headers) ORDER BY 1)
    FROM (SELECT o.payload, o.headers FROM outbox o WHERE o.id = event
          UNION ALL SELECT a.payload, a.headers FROM outbox_archive a WHERE a.id = event LIMIT 1) e
$$;

CREATE FUNCTION outbox_prune_attempts(after_id bigint, batch integer, older_than interval, dry_run boolean, OUT mine boolean, OUT last_id bigint, OUT examined integer, OUT finished boolean, OUT removed integer) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'utc'
    SET "DateStyle" TO 'iso'
    SET lock_timeout TO '200ms'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
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
            LOCK TABLE ONLY outbox_archive IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
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
    FROM (SELECT a.id, a.started_at FROM outbox_attempt a WHERE a.id > after_id ORDER BY a.id LIMIT batch) e;
    removed := coalesce(cardinality(due), 0);
    finished := examined < batch OR removed = 0;
    IF removed > 0 AND NOT dry_run THEN
        DELETE FROM outbox_attempt a WHERE a.id = ANY (due);
    END IF;
END
$$;

CREATE FUNCTION outbox_prune_processed_events(from_page bigint, batch integer, older_than interval, dry_run boolean, OUT mine boolean, OUT next_page bigint, OUT examined integer, OUT finished boolean, OUT removed integer) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'utc'
    SET "DateStyle" TO 'iso'
    SET lock_timeout TO '200ms'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
DECLARE
    tables regclass := to_regclass(format('%I.processed_events', 'public'));
BEGIN
    next_page := from_page + batch;
    examined := batch;
    finished := true;
    removed := 0;
    BEGIN
        IF NOT dry_run THEN
            LOCK TABLE ONLY outbox_archive IN SHARE UPDATE EXCLUSIVE MODE NOWAIT;
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
          AND p.oid = to_regprocedure(format('%I.inbox_prune(text, bigint, integer, interval, boolean)', 'public'))
    ) THEN
        RAISE EXCEPTION 'outbox: the receiver''s tables in schema % are not those of its migrations, or do not belong to %', 'public', current_user
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'Apply the migrations of the inbox as the owner of outbox, or set retention.processed_events to 0.';
    END IF;
    SELECT (p->>'next_page')::bigint, (p->>'finished')::boolean, (p->>'removed')::integer INTO next_page, finished, removed
    FROM inbox_prune(NULL::text, from_page, batch, older_than, dry_run) p;
END
$$;

CREATE FUNCTION outbox_refuse_delivery() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    RAISE EXCEPTION 'new row for relation "outbox_delivery" violates check constraint "%"', TG_NAME
        USING ERRCODE = 'check_violation', CONSTRAINT = TG_NAME, TABLE = 'outbox_delivery', SCHEMA = 'public',
              DETAIL = format('The delivery is that of event %s to %s.', NEW.event_id, NEW.destination);
END
$$;

CREATE FUNCTION outbox_refuse_truncate() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF EXISTS (SELECT FROM outbox_delivery) THEN
        RAISE EXCEPTION 'outbox: events have deliveries'
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Stop all relays and TRUNCATE outbox_delivery, outbox_attempt first.';
    END IF;
    RETURN NULL;
END
$$;

CREATE FUNCTION outbox_refuse_update() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    RAISE EXCEPTION 'outbox: event % is immutable; insert a new event instead', OLD.id
        USING ERRCODE = 'integrity_constraint_violation';
END
$$;

CREATE FUNCTION outbox_release_parked(after_id bigint, last_id bigint) RETURNS bigint
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
    WITH parked AS MATERIALIZED (
        SELECT p.event_id, e.event_type FROM outbox_delivery p
        CROSS JOIN LATERAL (SELECT event_type FROM outbox WHERE id = p.event_id LIMIT 1) e
        WHERE p.destination = '' AND p.status = 'pending' AND p.event_id > after_id AND p.event_id <= last_id
          AND EXISTS (SELECT FROM outbox_route r WHERE e.event_type LIKE r.like_pattern)
        FOR UPDATE OF p
    ), gone AS (
        DELETE FROM outbox_delivery p USING parked
        WHERE p.event_id = parked.event_id AND p.destination = ''
        RETURNING p.event_id, parked.event_type, p.joined, p.next_attempt_at, p.ordering_key, p.payload_bytes
    ), routed AS (
        INSERT INTO outbox_delivery (event_id, destination, joined, next_attempt_at, ordering_key, payload_bytes)
        SELECT DISTINCT g.event_id, r.destination, g.joined, greatest(g.next_attempt_at, now()), g.ordering_key, g.payload_bytes
        FROM gone g JOIN outbox_route r ON g.event_type LIKE r.like_pattern
        ON CONFLICT DO NOTHING
        RETURNING destination, ordering_key
    ), reordered AS (
        INSERT INTO outbox_destination AS d (destination, reordered)
        SELECT DISTINCT destination, 1::bigint FROM routed WHERE ordering_key IS NOT NULL ORDER BY destination
        ON CONFLICT (destination) DO UPDATE SET reordered = d.reordered + 1
    )
    SELECT count(*) FROM gone
$$;

CREATE FUNCTION outbox_reveal(entry bigint, OUT payload text, OUT headers jsonb) RETURNS SETOF record
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT e.payload::text, e.headers
    FROM outbox_audit t CROSS JOIN LATERAL (
        SELECT o.payload, o.headers FROM outbox o WHERE o.id = t.event_id
        UNION ALL SELECT a.payload, a.headers FROM outbox_archive a WHERE a.id = t.event_id LIMIT 1) e
    WHERE t.id = entry AND t.action = 'reveal_payload' AND t.detail = 'login ' || session_user::text
      AND t.at < now() AND t.at > now() - interval '1 minute'
$$;

CREATE FUNCTION outbox_route_added() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO outbox_destination AS d (destination, parked_after)
    SELECT DISTINCT r.destination, 0::bigint FROM new_route r ORDER BY 1 -- as others lock them
    ON CONFLICT (destination) DO UPDATE SET parked_after = 0;
    RETURN NULL;
END
$$;

CREATE FUNCTION outbox_wake() RETURNS xid8
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF coalesce(current_setting('outbox.notify', true), '') <> 'off' AND pg_notification_queue_usage() < 0.5 THEN
        PERFORM pg_notify('outbox_wake', 'public');
    END IF;
    PERFORM set_config('outbox.woken', pg_current_xact_id() || ' ' || coalesce(to_regclass(format('%I.outbox_armed', 'public'::text))::oid, 0), true);
    RETURN pg_current_xact_id();
END
$$;

CREATE FUNCTION processed_events_keep() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    RAISE EXCEPTION 'inbox: the event that is being processed keeps its row in processed_events'
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'Without the row the event would take effect again. Set what is personal in it to NULL instead.';
END
$$;

CREATE TABLE inbox_events (
    receiver text NOT NULL COLLATE pg_catalog."C",
    source text NOT NULL COLLATE pg_catalog."C",
    idempotency_key text NOT NULL COLLATE pg_catalog."C",
    event_type text DEFAULT ''::text NOT NULL,
    event_version integer DEFAULT 1 NOT NULL,
    related_reference text,
    processing_state text NOT NULL COLLATE pg_catalog."C",
    received_at timestamp with time zone DEFAULT now() NOT NULL,
    processed_at timestamp with time zone,
    attempts integer DEFAULT 0 NOT NULL,
    next_attempt_at timestamp with time zone,
    last_error text,
    payload bytea,
    request_headers jsonb,
    event_id bigint,
    ordering_key text COLLATE pg_catalog."C",
    sequence bigint DEFAULT 0 NOT NULL,
    not_after timestamp with time zone,
    inbox_id bigint NOT NULL,
    claim bigint DEFAULT 0 NOT NULL,
    claimed_by text,
    claimed_at timestamp with time zone,
    interruptions integer DEFAULT 0 NOT NULL,
    CONSTRAINT inbox_events_state_is_known CHECK ((processing_state = ANY (ARRAY['pending'::text, 'processing'::text, 'succeeded'::text, 'ignored'::text, 'failed'::text])))
);

COMMENT ON TABLE inbox_events IS 'Events that were recorded with their payload, and their state: the queue of an inbox.';

CREATE TABLE inbox_forgotten (
    receiver text NOT NULL COLLATE pg_catalog."C",
    source text NOT NULL COLLATE pg_catalog."C",
    received_before timestamp with time zone NOT NULL,
    announced_at timestamp with time zone NOT NULL,
    removable_before timestamp with time zone DEFAULT '-infinity'::timestamp with time zone NOT NULL,
    CONSTRAINT inbox_forgotten_keeps_the_last_day CHECK ((received_before <= (announced_at - '24:00:00'::interval)))
);

COMMENT ON TABLE inbox_forgotten IS 'By receiver and sender: rows of processed_events that were received before this moment may be gone. Events created before it that are not known are refused.';

CREATE TABLE inbox_freshness (
    receiver text DEFAULT ''::text NOT NULL COLLATE pg_catalog."C",
    scope text NOT NULL COLLATE pg_catalog."C",
    entity text NOT NULL COLLATE pg_catalog."C",
    sequence bigint,
    at timestamp with time zone,
    tiebreak bigint,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT inbox_freshness_entity_is_1_to_255_bytes CHECK (((octet_length(entity) >= 1) AND (octet_length(entity) <= 255))),
    CONSTRAINT inbox_freshness_is_by_sequence_or_by_time CHECK ((((sequence IS NULL) <> (at IS NULL)) AND ((at IS NULL) = (tiebreak IS NULL)))),
    CONSTRAINT inbox_freshness_scope_is_1_to_255_bytes CHECK (((octet_length(scope) >= 1) AND (octet_length(scope) <= 255)))
)
WITH (fillfactor='80');

COMMENT ON TABLE inbox_freshness IS 'The newest version of each entity that was applied: what comes with an older one is stale.';

CREATE SEQUENCE inbox_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE inbox_id_seq OWNED BY inbox_events.inbox_id;

CREATE SEQUENCE outbox_armed
    START WITH 0
    INCREMENT BY 1
    MINVALUE 0
    NO MAXVALUE
    CACHE 1;

CREATE TABLE outbox (
    id bigint NOT NULL,
    event_type outbox_event_type NOT NULL,
    event_version integer DEFAULT 1 NOT NULL,
    payload json NOT NULL,
    idempotency_key outbox_idempotency_key NOT NULL,
    ordering_key text COLLATE pg_catalog."C",
    related_reference text,
    headers jsonb DEFAULT '{}'::jsonb NOT NULL,
    available_at timestamp with time zone DEFAULT now() NOT NULL,
    created_at outbox_created_at DEFAULT now() NOT NULL,
    xid xid8 DEFAULT 
CASE
    WHEN (((pg_sequence_last_value('outbox_armed'::regclass))::double precision > (date_part('epoch'::text, clock_timestamp()) * (1000)::double precision)) AND (COALESCE(current_setting('outbox.woken'::text, true), ''::text) <> (((pg_current_xact_id())::text || ' '::text) || (('outbox_armed'::regclass)::oid)::text))) THEN outbox_wake()
    ELSE pg_current_xact_id()
END NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.05', toast.autovacuum_vacuum_scale_factor='0.05');

COMMENT ON TABLE outbox IS 'Events, written once by producers inside their own transactions. Relays take them and write their deliveries.';

COMMENT ON COLUMN outbox.xid IS 'The transaction that inserted the event. 2: its deliveries were made by outbox_cover_events.';

CREATE TABLE outbox_alert (
    rule text NOT NULL COLLATE pg_catalog."C",
    subject text NOT NULL COLLATE pg_catalog."C",
    began_at timestamp with time zone DEFAULT now() NOT NULL,
    opened_at timestamp with time zone DEFAULT now() NOT NULL,
    last_at timestamp with time zone DEFAULT now() NOT NULL,
    resolved_at timestamp with time zone,
    due_at timestamp with time zone DEFAULT now(),
    count bigint DEFAULT 1 NOT NULL,
    counted_before bigint DEFAULT 0 NOT NULL,
    notified_count bigint DEFAULT 0 NOT NULL,
    level bigint DEFAULT 0 NOT NULL,
    first_event_id bigint,
    returned integer DEFAULT 0 NOT NULL,
    first_error text,
    detail text,
    acknowledged_by text,
    CONSTRAINT outbox_alert_counts_are_sane CHECK (((count > 0) AND ((notified_count >= 0) AND (notified_count <= count))))
)
WITH (fillfactor='50');

COMMENT ON TABLE outbox_alert IS 'Open alerts, one row per rule and subject, so that many relays send each once.';

COMMENT ON COLUMN outbox_alert.resolved_at IS 'When what the alert is about ended; NULL while it lasts. The row goes some time after that has been told.';

COMMENT ON COLUMN outbox_alert.notified_count IS 'The highest count that any channel has been told.';

COMMENT ON COLUMN outbox_alert.detail IS 'What it is about, in words; the latest state.';

CREATE TABLE outbox_alert_notice (
    rule text NOT NULL COLLATE pg_catalog."C",
    subject text NOT NULL COLLATE pg_catalog."C",
    channel text NOT NULL,
    sent_at timestamp with time zone,
    sent_level bigint DEFAULT 0 NOT NULL,
    first_sent_at timestamp with time zone,
    ended_sent_at timestamp with time zone,
    claimed_until timestamp with time zone
)
WITH (fillfactor='50');

COMMENT ON TABLE outbox_alert_notice IS 'What each channel has been told of each open alert.';

CREATE TABLE outbox_alert_past (
    id bigint NOT NULL,
    rule text NOT NULL COLLATE pg_catalog."C",
    subject text NOT NULL COLLATE pg_catalog."C",
    began_at timestamp with time zone NOT NULL,
    resolved_at timestamp with time zone NOT NULL,
    returned integer NOT NULL,
    count bigint NOT NULL,
    first_event_id bigint,
    first_error text,
    detail text,
    acknowledged_by text,
    notices jsonb NOT NULL
);

COMMENT ON TABLE outbox_alert_past IS 'Alerts that have ended within two weeks: notices says which channels were sent them, and when.';

ALTER TABLE outbox_alert_past ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME outbox_alert_past_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE outbox_alert_silence (
    rule text NOT NULL COLLATE pg_catalog."C",
    subject text NOT NULL COLLATE pg_catalog."C",
    until timestamp with time zone NOT NULL,
    reason text DEFAULT ''::text NOT NULL,
    created_by text NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE outbox_alert_silence IS 'Alerts that are not sent until a time. An empty rule or subject stands for all.';

CREATE TABLE outbox_archive (
    id bigint NOT NULL,
    event_type text NOT NULL COLLATE pg_catalog."C",
    event_version integer NOT NULL,
    payload json NOT NULL,
    idempotency_key text NOT NULL COLLATE pg_catalog."C",
    ordering_key text COLLATE pg_catalog."C",
    related_reference text,
    headers jsonb NOT NULL,
    available_at timestamp with time zone NOT NULL,
    created_at timestamp with time zone NOT NULL,
    archived_at timestamp with time zone DEFAULT now() NOT NULL,
    deliveries jsonb NOT NULL
)
PARTITION BY RANGE (created_at);

COMMENT ON TABLE outbox_archive IS 'Settled events with their deliveries. Whole months are dropped when they have been kept long enough.';

COMMENT ON COLUMN outbox_archive.deliveries IS 'What became of the event at each destination: an array of objects; times in UTC. Fields are added, and never renamed; those without a value are left out. claim leads to the attempts of outbox_attempt.';

CREATE TABLE outbox_attempt (
    id bigint NOT NULL,
    event_id bigint NOT NULL,
    claim bigint NOT NULL,
    started_at timestamp with time zone NOT NULL,
    duration_ms integer NOT NULL,
    attempt integer NOT NULL,
    relay_id integer NOT NULL,
    http_status smallint,
    destination text NOT NULL COLLATE pg_catalog."C",
    outcome text NOT NULL COLLATE pg_catalog."C",
    reason text NOT NULL COLLATE pg_catalog."C",
    error text
);

COMMENT ON TABLE outbox_attempt IS 'The log of attempts that did not deliver (of all attempts, when configured so).';

ALTER TABLE outbox_attempt ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME outbox_attempt_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE outbox_audit (
    id bigint NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    event_id bigint,
    matched bigint DEFAULT 0 NOT NULL,
    done bigint DEFAULT 0 NOT NULL,
    actor text NOT NULL,
    origin text NOT NULL COLLATE pg_catalog."C",
    action text NOT NULL COLLATE pg_catalog."C",
    state text DEFAULT 'done'::text NOT NULL COLLATE pg_catalog."C",
    destination text COLLATE pg_catalog."C",
    selection jsonb,
    detail text,
    CONSTRAINT outbox_audit_columns_are_sane CHECK (((origin = ANY (ARRAY['cli'::text, 'api'::text, 'page'::text])) AND (state = ANY (ARRAY['running'::text, 'done'::text, 'interrupted'::text, 'failed'::text])) AND (matched >= 0) AND (done >= 0)))
);

COMMENT ON TABLE outbox_audit IS 'What operators changed or revealed; never a payload. Nothing removes its rows.';

COMMENT ON COLUMN outbox_audit.matched IS 'How many deliveries the preview counted; 0: there was none.';

COMMENT ON COLUMN outbox_audit.done IS 'How many deliveries were changed so far.';

COMMENT ON COLUMN outbox_audit.actor IS 'Who: user@host of a command, the login of the API or the page; without either the database user.';

COMMENT ON COLUMN outbox_audit.selection IS 'What a bulk operation was to change, so that another process can continue it.';

ALTER TABLE outbox_audit ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME outbox_audit_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE outbox_delivery (
    event_id bigint NOT NULL,
    claim bigint DEFAULT 0 NOT NULL,
    next_attempt_at timestamp with time zone DEFAULT now() NOT NULL,
    joined bigint DEFAULT 0,
    blocked_by bigint,
    lease_expires_at timestamp with time zone,
    last_attempt_at timestamp with time zone,
    delivered_at timestamp with time zone,
    not_after timestamp with time zone,
    claimed_by integer,
    attempts integer DEFAULT 0 NOT NULL,
    payload_bytes integer DEFAULT 0 NOT NULL,
    rescues smallint DEFAULT 0 NOT NULL,
    last_http_status smallint,
    replay boolean DEFAULT false NOT NULL,
    destination text NOT NULL COLLATE pg_catalog."C",
    status text DEFAULT 'pending'::text NOT NULL COLLATE pg_catalog."C",
    ordering_key text COLLATE pg_catalog."C",
    last_reason text,
    last_error text
)
WITH (fillfactor='44', autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='1');
ALTER TABLE ONLY outbox_delivery ALTER COLUMN ordering_key SET (n_distinct=-0.9);

COMMENT ON TABLE outbox_delivery IS 'One event to one destination. Destination '''' means parked: no route matched.';

COMMENT ON COLUMN outbox_delivery.claim IS 'The fence: grows with every claim; a settle with an older number changes nothing.';

COMMENT ON COLUMN outbox_delivery.joined IS 'The place in the order of the ordering key, before event_id. 0: the event was due when a relay took it. NULL: it is due later and has not joined its key, so that it holds no other event. Otherwise the number of the range it joined behind, times 2^22, and a counter.';

COMMENT ON COLUMN outbox_delivery.blocked_by IS 'The event of its ordering key behind which a pending delivery waits. Claims do not see it until that event is delivered or discarded. NULL: it waits for nothing but its time.';

COMMENT ON COLUMN outbox_delivery.not_after IS 'When the last request may reach the receiver, as X-Outbox-Not-After has told it, or may have told it; afterwards only an operator sends it again. NULL: it was told nothing, or has accepted.';

COMMENT ON COLUMN outbox_delivery.claimed_by IS 'The relay (outbox_relay.id) that has it in flight, or died with it: lease_expires_at and outbox_void say whether the claim holds.';

COMMENT ON COLUMN outbox_delivery.attempts IS 'POSTs made. Written by the settle: a stop, a rescue or a hold spends none.';

COMMENT ON COLUMN outbox_delivery.rescues IS 'Up to six: claims since the last settle whose relay died, or let the lease end. Beyond: requests since then that were sent alone and never settled. At a limit the delivery fails as crash_loop.';

COMMENT ON COLUMN outbox_delivery.replay IS 'An operator made it pending again: it is sent after live events and backlog, and says so in a header.';

CREATE TABLE outbox_destination (
    destination text NOT NULL COLLATE pg_catalog."C",
    paused boolean DEFAULT false NOT NULL,
    paused_reason text,
    paused_at timestamp with time zone,
    breaker text DEFAULT 'closed'::text NOT NULL COLLATE pg_catalog."C",
    breaker_opened_at timestamp with time zone,
    breaker_until timestamp with time zone,
    breaker_relay_id integer,
    breaker_probes integer DEFAULT 0 NOT NULL,
    breaker_error text,
    breaker_failures integer DEFAULT 0 NOT NULL,
    breaker_events bigint[] DEFAULT '{}'::bigint[] NOT NULL,
    reordered bigint DEFAULT 0 NOT NULL,
    parked_after bigint,
    CONSTRAINT outbox_destination_breaker_failures_is_not_negative CHECK ((breaker_failures >= 0)),
    CONSTRAINT outbox_destination_breaker_has_times CHECK ((((breaker = 'closed'::text) = (breaker_opened_at IS NULL)) AND ((breaker = 'closed'::text) = (breaker_until IS NULL)))),
    CONSTRAINT outbox_destination_breaker_is_known CHECK ((breaker = ANY (ARRAY['closed'::text, 'open'::text, 'half_open'::text]))),
    CONSTRAINT outbox_destination_half_open_has_a_relay CHECK (((breaker = 'half_open'::text) = (breaker_relay_id IS NOT NULL))),
    CONSTRAINT outbox_destination_paused_has_time CHECK ((paused = (paused_at IS NOT NULL)))
);

COMMENT ON TABLE outbox_destination IS 'Runtime state of a destination that must outlive a relay process.';

COMMENT ON COLUMN outbox_destination.breaker_failures IS 'While the breaker is closed: failures of all relays against the destination, of which each answer takes back some. Only failures write it, and answers that follow them.';

COMMENT ON COLUMN outbox_destination.breaker_events IS 'The first events that were answered with a failure; also while the breaker is open.';

COMMENT ON COLUMN outbox_destination.reordered IS 'Grows whenever deliveries of earlier events become pending again: by a replay, or because they were parked. Relays then forget up to which event an ordering key is settled.';

COMMENT ON COLUMN outbox_destination.parked_after IS 'A route to the destination was added: parked deliveries up to this event have been looked through for it, those behind it not yet. NULL: all have.';

CREATE TABLE outbox_history (
    step smallint NOT NULL,
    destination text NOT NULL COLLATE pg_catalog."C",
    at timestamp with time zone NOT NULL,
    event_type text NOT NULL COLLATE pg_catalog."C",
    delivered bigint NOT NULL,
    failed bigint NOT NULL,
    retried bigint NOT NULL,
    probes bigint NOT NULL,
    backlog bigint,
    took integer[] NOT NULL,
    latency integer[] NOT NULL
)
WITH (fillfactor='50');

COMMENT ON TABLE outbox_history IS 'Attempts, times and backlog of each minute and hour, added up over relays.';

ALTER TABLE outbox ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME outbox_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE outbox_identity (
    only_row boolean DEFAULT true NOT NULL,
    system_identifier bigint NOT NULL,
    database_oid bigint NOT NULL,
    timeline integer NOT NULL,
    environment text NOT NULL COLLATE pg_catalog."C",
    addresses text[] NOT NULL,
    recorded_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT outbox_identity_environment_is_at_most_63_printable_ascii CHECK (((octet_length(environment) <= 63) AND (environment !~ '[^\x20-\x7e]'::text))),
    CONSTRAINT outbox_identity_is_one_row CHECK (only_row)
);

COMMENT ON TABLE outbox_identity IS 'The database that relays last accepted as theirs. On any other they quarantine.';

CREATE TABLE outbox_intake (
    only_row boolean DEFAULT true NOT NULL,
    system_identifier bigint DEFAULT 0 NOT NULL,
    timeline integer DEFAULT 0 NOT NULL,
    recorded_at timestamp with time zone DEFAULT now() NOT NULL,
    routes bigint DEFAULT 0 NOT NULL,
    destinations bigint DEFAULT 0 NOT NULL,
    CONSTRAINT outbox_intake_is_one_row CHECK (only_row)
);

COMMENT ON TABLE outbox_intake IS 'The server whose transaction ids outbox and outbox_range have. 0: it did not tell its identifier or timeline.';

COMMENT ON COLUMN outbox_intake.routes IS 'Grows with each change of outbox_route.';

COMMENT ON COLUMN outbox_intake.destinations IS 'Grows whenever a destination is paused or resumed, or its breaker changes.';

CREATE TABLE outbox_range (
    seq bigint NOT NULL,
    relay_id integer NOT NULL,
    fence bigint NOT NULL,
    base pg_snapshot NOT NULL,
    target pg_snapshot NOT NULL,
    low bigint NOT NULL,
    upto bigint NOT NULL,
    new_above bigint,
    more boolean NOT NULL,
    oldest_open_seq bigint NOT NULL,
    keys integer[],
    promised interval DEFAULT '00:00:00'::interval NOT NULL,
    taken_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    ended_at timestamp with time zone,
    beyond boolean DEFAULT false NOT NULL
)
WITH (fillfactor='50');

COMMENT ON TABLE outbox_range IS 'Events that a relay has taken together: those visible in target and not in base, with ids above low and up to upto. The last row is how far all relays have come.';

COMMENT ON COLUMN outbox_range.fence IS 'Grows with the clock at each take and rescue. A settle with another number writes nothing.';

COMMENT ON COLUMN outbox_range.new_above IS 'NULL: the range is a whole difference. Otherwise it was cut by id, and the events of transactions from xmax(base) on have ids above this one.';

COMMENT ON COLUMN outbox_range.more IS 'The difference of base and target has events above upto. The next range continues it.';

COMMENT ON COLUMN outbox_range.oldest_open_seq IS 'The seq of the oldest range that was open when this one was taken; its own if none was.';

COMMENT ON COLUMN outbox_range.keys IS 'Hashes of the ordering keys of its events. NULL: none has a key.';

COMMENT ON COLUMN outbox_range.promised IS 'The shortest X-Outbox-Not-After that its relay may have told a receiver, counted from taken_at.';

COMMENT ON COLUMN outbox_range.ended_at IS 'When each of its deliveries had a row. NULL: the range is open.';

COMMENT ON COLUMN outbox_range.beyond IS 'Events that are not visible in target may have rows already. A take leaves these out.';

CREATE TABLE outbox_relay (
    id integer NOT NULL,
    name text NOT NULL,
    version text NOT NULL,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    heartbeat_at timestamp with time zone DEFAULT now() NOT NULL,
    lease interval DEFAULT '00:01:00'::interval NOT NULL,
    session_pid integer,
    server_started_at timestamp with time zone DEFAULT pg_postmaster_start_time() NOT NULL,
    asleep boolean DEFAULT false NOT NULL,
    quarantined text,
    environment text,
    address text,
    reload_error text,
    reload_failed_at timestamp with time zone
)
WITH (fillfactor='50');

COMMENT ON TABLE outbox_relay IS 'Live relays. A row belongs to a dead relay when its session is gone, when its heartbeat is older than 15 seconds or, without a session, older than its lease. Its claims end with the row.';

COMMENT ON COLUMN outbox_relay.lease IS 'For how long the claims of the relay hold. Without a session, also after how long without a heartbeat it is dead.';

COMMENT ON COLUMN outbox_relay.session_pid IS 'The backend of the relay''s session, whose application_name is ''outbox-relay session '' and the id. Null, behind a pooler: only an old heartbeat says that the relay is dead.';

COMMENT ON COLUMN outbox_relay.server_started_at IS 'When the server of the session started. A copy of this row on another server has no session there.';

COMMENT ON COLUMN outbox_relay.asleep IS 'Nothing of the relay runs: a connection that outboxes share writes its heartbeat twice a minute and listens for it.';

COMMENT ON COLUMN outbox_relay.quarantined IS 'Why the relay does nothing here. Null: it works. Set together with its environment and address, which accepting records.';

CREATE TABLE outbox_relay_destination (
    relay_id integer NOT NULL,
    destination text NOT NULL COLLATE pg_catalog."C",
    settings text DEFAULT ''::text NOT NULL,
    secrets text DEFAULT ''::text NOT NULL,
    refused_at timestamp with time zone,
    refused_error text,
    wait_until timestamp with time zone,
    slowed_to double precision
);

COMMENT ON TABLE outbox_relay_destination IS 'Which destinations each registered relay delivers to. Pending deliveries of any other destination are unserved.';

ALTER TABLE outbox_relay ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME outbox_relay_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE outbox_relay_route (
    relay_id integer NOT NULL,
    pattern text NOT NULL COLLATE pg_catalog."C",
    destination text NOT NULL COLLATE pg_catalog."C"
);

COMMENT ON TABLE outbox_relay_route IS 'The routes that each registered relay was configured with; one that stops withdraws its own first. outbox_route is the union of them, or what it was while there are none.';

CREATE TABLE outbox_rescue (
    at timestamp with time zone DEFAULT now() NOT NULL,
    relay_id integer NOT NULL
);

ALTER TABLE ONLY outbox_rescue REPLICA IDENTITY FULL;

COMMENT ON TABLE outbox_rescue IS 'Relays that were found dead in the last day.';

CREATE TABLE outbox_route (
    pattern text NOT NULL COLLATE pg_catalog."C",
    destination text NOT NULL COLLATE pg_catalog."C",
    like_pattern text GENERATED ALWAYS AS (replace(replace(replace(replace(pattern, '\'::text, '\\'::text), '%'::text, '\%'::text), '_'::text, '\_'::text), '*'::text, '%'::text)) STORED NOT NULL COLLATE pg_catalog."C",
    CONSTRAINT outbox_route_destination_is_a_name CHECK ((destination ~ '^[a-z0-9][a-z0-9_-]{0,62}$'::text)),
    CONSTRAINT outbox_route_pattern_is_1_to_255_printable_ascii_no_blanks CHECK ((pattern ~ '^[\x21-\x7e]{1,255}$'::text))
);

COMMENT ON TABLE outbox_route IS 'Which event types go to which destination: the routes of all registered relays together. Relays keep it so.';

CREATE TABLE outbox_undelivered (
    only_row boolean DEFAULT true NOT NULL,
    searched_at timestamp with time zone DEFAULT '-infinity'::timestamp with time zone NOT NULL,
    recent_id bigint,
    round_id bigint DEFAULT 0 NOT NULL,
    missing bigint[] DEFAULT '{}'::bigint[] NOT NULL,
    CONSTRAINT outbox_undelivered_is_one_row CHECK (only_row)
)
WITH (fillfactor='50');

COMMENT ON TABLE outbox_undelivered IS 'How far relays have looked for events without deliveries, and the ids that they found, at most 1,001.';

CREATE TABLE outbox_void (
    relay_id integer NOT NULL,
    after timestamp with time zone NOT NULL,
    until timestamp with time zone NOT NULL,
    died boolean NOT NULL
);

COMMENT ON TABLE outbox_void IS 'Claims that no longer hold although their lease lasts: of relays that died or left, or claims whose acknowledgement was lost.';

CREATE TABLE outbox_watch (
    only_row boolean DEFAULT true NOT NULL,
    watched_at timestamp with time zone DEFAULT '-infinity'::timestamp with time zone NOT NULL,
    sample jsonb DEFAULT '{}'::jsonb NOT NULL,
    salt uuid DEFAULT gen_random_uuid() NOT NULL,
    archived_at timestamp with time zone DEFAULT now() NOT NULL,
    archive_error text,
    CONSTRAINT outbox_watch_is_one_row CHECK (only_row)
)
WITH (fillfactor='50');

COMMENT ON TABLE outbox_watch IS 'What a relay saw when it last looked around the database, for the others.';

CREATE TABLE processed_events (
    receiver text NOT NULL COLLATE pg_catalog."C",
    source text NOT NULL COLLATE pg_catalog."C",
    idempotency_key text NOT NULL COLLATE pg_catalog."C",
    destination text COLLATE pg_catalog."C",
    event_type text DEFAULT ''::text NOT NULL,
    event_version integer DEFAULT 1 NOT NULL,
    event_id bigint,
    related_reference text,
    processing_state text NOT NULL COLLATE pg_catalog."C",
    payload_hash bytea,
    received_at timestamp with time zone DEFAULT now() NOT NULL,
    processed_at timestamp with time zone,
    not_after timestamp with time zone,
    attempts integer DEFAULT 1 NOT NULL,
    next_attempt_at timestamp with time zone,
    last_error text,
    response_status smallint,
    payload bytea
);

COMMENT ON TABLE processed_events IS 'Events this receiver has processed, by sender and idempotency key: the memory that suppresses duplicates.';

COMMENT ON COLUMN processed_events.attempts IS '1, however often the sender sent the event: an attempt that failed leaves no row. 0: recorded, and inbox_events counts the attempts.';

COMMENT ON COLUMN processed_events.next_attempt_at IS 'Reserved, always NULL.';

COMMENT ON COLUMN processed_events.payload IS 'Reserved, always NULL: this table keeps no payloads.';

ALTER TABLE ONLY inbox_events ALTER COLUMN inbox_id SET DEFAULT nextval('inbox_id_seq'::regclass);

ALTER TABLE ONLY inbox_events
    ADD CONSTRAINT inbox_events_pkey PRIMARY KEY (idempotency_key, receiver, source);

ALTER TABLE ONLY inbox_forgotten
    ADD CONSTRAINT inbox_forgotten_pkey PRIMARY KEY (receiver, source);

ALTER TABLE ONLY inbox_freshness
    ADD CONSTRAINT inbox_freshness_pkey PRIMARY KEY (receiver, scope, entity);

ALTER TABLE ONLY outbox_alert_notice
    ADD CONSTRAINT outbox_alert_notice_pkey PRIMARY KEY (rule, subject, channel);

ALTER TABLE ONLY outbox_alert_past
    ADD CONSTRAINT outbox_alert_past_pkey PRIMARY KEY (id);

ALTER TABLE ONLY outbox_alert
    ADD CONSTRAINT outbox_alert_pkey PRIMARY KEY (rule, subject);

ALTER TABLE ONLY outbox_alert_silence
    ADD CONSTRAINT outbox_alert_silence_pkey PRIMARY KEY (rule, subject);

ALTER TABLE ONLY outbox_archive
    ADD CONSTRAINT outbox_archive_pkey PRIMARY KEY (id, created_at);

ALTER TABLE ONLY outbox_attempt
    ADD CONSTRAINT outbox_attempt_pkey PRIMARY KEY (id);

ALTER TABLE ONLY outbox_audit
    ADD CONSTRAINT outbox_audit_pkey PRIMARY KEY (id);

ALTER TABLE ONLY outbox_delivery
    ADD CONSTRAINT outbox_delivery_pkey PRIMARY KEY (event_id, destination);

ALTER TABLE ONLY outbox_destination
    ADD CONSTRAINT outbox_destination_pkey PRIMARY KEY (destination);

ALTER TABLE ONLY outbox_history
    ADD CONSTRAINT outbox_history_pkey PRIMARY KEY (step, destination, at, event_type);

ALTER TABLE ONLY outbox
    ADD CONSTRAINT outbox_idempotency_key_is_unique UNIQUE (idempotency_key);

ALTER TABLE ONLY outbox_identity
    ADD CONSTRAINT outbox_identity_pkey PRIMARY KEY (only_row);

ALTER TABLE ONLY outbox_intake
    ADD CONSTRAINT outbox_intake_pkey PRIMARY KEY (only_row);

ALTER TABLE ONLY outbox
    ADD CONSTRAINT outbox_pkey PRIMARY KEY (id);

ALTER TABLE ONLY outbox_range
    ADD CONSTRAINT outbox_range_pkey PRIMARY KEY (seq);

ALTER TABLE ONLY outbox_relay_destination
    ADD CONSTRAINT outbox_relay_destination_pkey PRIMARY KEY (destination, relay_id);

ALTER TABLE ONLY outbox_relay
    ADD CONSTRAINT outbox_relay_pkey PRIMARY KEY (id);

ALTER TABLE ONLY outbox_relay_route
    ADD CONSTRAINT outbox_relay_route_pkey PRIMARY KEY (pattern, destination, relay_id);

ALTER TABLE ONLY outbox_route
    ADD CONSTRAINT outbox_route_pkey PRIMARY KEY (pattern, destination);

ALTER TABLE ONLY outbox_undelivered
    ADD CONSTRAINT outbox_undelivered_pkey PRIMARY KEY (only_row);

ALTER TABLE ONLY outbox_void
    ADD CONSTRAINT outbox_void_pkey PRIMARY KEY (relay_id, until);

ALTER TABLE ONLY outbox_watch
    ADD CONSTRAINT outbox_watch_pkey PRIMARY KEY (only_row);

ALTER TABLE ONLY processed_events
    ADD CONSTRAINT processed_events_pkey PRIMARY KEY (receiver, source, idempotency_key);

CREATE INDEX inbox_events_due ON inbox_events USING btree (receiver, source, event_type, next_attempt_at, inbox_id) WHERE ((processing_state = 'pending'::text) AND (next_attempt_at IS NOT NULL));

CREATE INDEX inbox_events_failed_in_order ON inbox_events USING btree (receiver, source, ordering_key, sequence, inbox_id) WHERE ((processing_state = 'failed'::text) AND (ordering_key IS NOT NULL));

CREATE INDEX inbox_events_for_review ON inbox_events USING btree (receiver, source, inbox_id) WHERE (processing_state = ANY (ARRAY['failed'::text, 'ignored'::text]));

CREATE UNIQUE INDEX inbox_events_inbox_id ON inbox_events USING btree (inbox_id);

CREATE UNIQUE INDEX inbox_events_one_of_its_key ON inbox_events USING btree (receiver, source, ordering_key) WHERE ((ordering_key IS NOT NULL) AND ((processing_state = 'processing'::text) OR ((processing_state = 'pending'::text) AND (next_attempt_at IS NOT NULL))));

CREATE INDEX inbox_events_processing ON inbox_events USING btree (receiver, source, claimed_at) WHERE (processing_state = 'processing'::text);

CREATE INDEX inbox_events_waiting ON inbox_events USING btree (receiver, source, ordering_key, sequence, inbox_id) WHERE ((processing_state = 'pending'::text) AND (next_attempt_at IS NULL));

CREATE INDEX outbox_alert_past_resolved_at ON outbox_alert_past USING btree (resolved_at);

CREATE INDEX outbox_archive_archived_at ON ONLY outbox_archive USING btree (archived_at);

CREATE INDEX outbox_archive_key ON ONLY outbox_archive USING btree (idempotency_key);

CREATE UNIQUE INDEX outbox_attempt_claim ON outbox_attempt USING btree (event_id, destination, claim);

CREATE INDEX outbox_by_xid ON outbox USING btree (xid, id) WHERE (xid > '2'::xid8);

CREATE INDEX outbox_delivery_aside ON outbox_delivery USING btree (destination, event_id) WHERE ((status = 'failed'::text) OR ((status = 'pending'::text) AND (destination = ''::text)));

CREATE INDEX outbox_delivery_due ON outbox_delivery USING btree (destination, replay, next_attempt_at, event_id) WHERE ((status = 'pending'::text) AND (blocked_by IS NULL));

CREATE INDEX outbox_delivery_heads ON outbox_delivery USING btree (destination, ordering_key, joined, event_id) WHERE ((status = 'failed'::text) AND (ordering_key IS NOT NULL));

CREATE INDEX outbox_delivery_order ON outbox_delivery USING btree (destination, ordering_key, joined, event_id) WHERE ((status = 'pending'::text) AND (ordering_key IS NOT NULL) AND (joined IS NOT NULL));

CREATE INDEX outbox_delivery_scheduled ON outbox_delivery USING btree (destination, ordering_key, next_attempt_at, event_id) WHERE ((status = 'pending'::text) AND (ordering_key IS NOT NULL) AND (joined IS NULL));

CREATE INDEX outbox_delivery_waiting ON outbox_delivery USING btree (destination, blocked_by, event_id) WHERE ((status = 'pending'::text) AND (blocked_by IS NOT NULL));

CREATE INDEX outbox_relay_route_relay ON outbox_relay_route USING btree (relay_id);

CREATE TRIGGER outbox_alert_changed BEFORE UPDATE OF count, resolved_at ON outbox_alert FOR EACH ROW EXECUTE FUNCTION outbox_alert_changed();

CREATE TRIGGER outbox_audit_is_kept BEFORE UPDATE ON outbox_audit FOR EACH ROW EXECUTE FUNCTION outbox_keep_audit();

CREATE TRIGGER outbox_delivery_columns_are_sane AFTER UPDATE OF status, delivered_at, attempts, next_attempt_at ON outbox_delivery FOR EACH ROW WHEN ((NOT ((new.status = ANY (ARRAY['pending'::text, 'delivered'::text, 'failed'::text, 'discarded'::text])) AND ((new.status = 'delivered'::text) = (new.delivered_at IS NOT NULL)) AND ((new.status = 'pending'::text) OR (new.claimed_by IS NULL)) AND (new.attempts >= 0) AND isfinite(new.next_attempt_at)))) EXECUTE FUNCTION outbox_refuse_delivery();

CREATE TRIGGER outbox_destination_is_counted AFTER UPDATE ON outbox_destination FOR EACH ROW WHEN ((((old.paused IS DISTINCT FROM new.paused) OR (old.breaker IS DISTINCT FROM new.breaker)) OR (old.breaker_relay_id IS DISTINCT FROM new.breaker_relay_id))) EXECUTE FUNCTION outbox_count_change();

CREATE TRIGGER outbox_destination_is_counted_when_gone AFTER DELETE ON outbox_destination FOR EACH ROW WHEN ((old.paused OR (old.breaker <> 'closed'::text))) EXECUTE FUNCTION outbox_count_change();

CREATE TRIGGER outbox_destination_is_counted_when_new AFTER INSERT ON outbox_destination FOR EACH ROW WHEN ((new.paused OR (new.breaker <> 'closed'::text))) EXECUTE FUNCTION outbox_count_change();

CREATE TRIGGER outbox_is_immutable BEFORE UPDATE OF id, event_type, event_version, payload, idempotency_key, ordering_key, related_reference, headers, available_at, created_at ON outbox FOR EACH ROW EXECUTE FUNCTION outbox_refuse_update();

CREATE TRIGGER outbox_keeps_deliveries BEFORE TRUNCATE ON outbox FOR EACH STATEMENT EXECUTE FUNCTION outbox_refuse_truncate();

CREATE TRIGGER outbox_route_added AFTER INSERT ON outbox_route REFERENCING NEW TABLE AS new_route FOR EACH STATEMENT EXECUTE FUNCTION outbox_route_added();

CREATE TRIGGER outbox_route_is_counted AFTER INSERT OR DELETE OR UPDATE OR TRUNCATE ON outbox_route FOR EACH STATEMENT EXECUTE FUNCTION outbox_count_change();

CREATE TRIGGER processed_events_keep BEFORE DELETE OR UPDATE OF receiver, source, idempotency_key, received_at ON processed_events FOR EACH ROW WHEN ((old.received_at = now())) EXECUTE FUNCTION processed_events_keep();

ALTER TABLE processed_events ENABLE ALWAYS TRIGGER processed_events_keep;

CREATE TRIGGER processed_events_keep_all BEFORE TRUNCATE ON processed_events FOR EACH STATEMENT WHEN ((COALESCE(current_setting('outbox_relay.lock_timeout'::text, true), ''::text) <> ''::text)) EXECUTE FUNCTION processed_events_keep();

ALTER TABLE processed_events ENABLE ALWAYS TRIGGER processed_events_keep_all;

ALTER TABLE ONLY outbox_alert_notice
    ADD CONSTRAINT outbox_alert_notice_rule_subject_fkey FOREIGN KEY (rule, subject) REFERENCES outbox_alert(rule, subject) ON DELETE CASCADE;

ALTER TABLE ONLY outbox_relay_destination
    ADD CONSTRAINT outbox_relay_destination_relay_id_fkey FOREIGN KEY (relay_id) REFERENCES outbox_relay(id) ON DELETE CASCADE;

ALTER TABLE ONLY outbox_relay_route
    ADD CONSTRAINT outbox_relay_route_relay_id_fkey FOREIGN KEY (relay_id) REFERENCES outbox_relay(id) ON DELETE CASCADE;

REVOKE ALL ON FUNCTION inbox_has_payload(id bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_archive_batch(after_id bigint, batch integer, older_than interval, dry_run boolean, OUT mine boolean, OUT last_id bigint, OUT examined integer, OUT finished boolean, OUT settled integer) FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_archive_partitions(OUT partition regclass, OUT starts timestamp with time zone, OUT ends timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_compare_events(types text[], versions integer[], payloads json[], keys text[], orderings text[], related text[], header_sets jsonb[], OUT number bigint, OUT found boolean, OUT written_by bigint, OUT differs text) FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_count_change() FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_cover_events(after_id bigint, batch integer, since pg_snapshot, OUT last_id bigint, OUT finished boolean, OUT deliveries bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_create_deliveries(after_id bigint, batch integer, OUT last_id bigint, OUT finished boolean, OUT events integer, OUT deliveries integer) FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_drop_archive(older_than interval, dry_run boolean, after_name text) FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_is_routed(event_id bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_order_reveal(event bigint, actor text, origin text) FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_outline(event bigint, OUT payload_bytes integer, OUT header_names text[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_prune_attempts(after_id bigint, batch integer, older_than interval, dry_run boolean, OUT mine boolean, OUT last_id bigint, OUT examined integer, OUT finished boolean, OUT removed integer) FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_prune_processed_events(from_page bigint, batch integer, older_than interval, dry_run boolean, OUT mine boolean, OUT next_page bigint, OUT examined integer, OUT finished boolean, OUT removed integer) FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_refuse_delivery() FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_refuse_truncate() FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_release_parked(after_id bigint, last_id bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION outbox_reveal(entry bigint, OUT payload text, OUT headers jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION processed_events_keep() FROM PUBLIC;

GRANT SELECT ON SEQUENCE outbox_armed TO PUBLIC;

