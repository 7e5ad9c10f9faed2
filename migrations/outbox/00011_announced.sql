-- A receiver in the same schema announces what it forgets before it does, so that it can refuse to guess; see inbox_prune in
-- the migrations of the inbox.

-- +goose Up
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION outbox_prune_processed_events(from_page bigint, batch integer, older_than interval, rehearsal boolean,
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
    IF to_regprocedure(format('%I.inbox_prune(text, bigint, integer, interval, boolean)', current_schema())) IS NOT NULL THEN
        SELECT p.next_page, p.finished, p.removed INTO next_page, finished, removed
        FROM inbox_prune(NULL, from_page, batch, older_than, rehearsal) p;
        RETURN;
    END IF;
    -- The receiver's tables are those of a version that does not refuse what it may have forgotten.
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

-- Replacing a function drops its settings.
-- +goose StatementBegin
DO $$
DECLARE
    setting text;
BEGIN
    EXECUTE format('ALTER FUNCTION outbox_prune_processed_events(bigint, integer, interval, boolean) SET search_path = %I, pg_temp', current_schema());
    FOREACH setting IN ARRAY ARRAY [
        'TimeZone = UTC', 'DateStyle = ISO', 'lock_timeout = ''200ms''',
        'enable_seqscan = off', 'enable_hashjoin = off', 'enable_mergejoin = off', 'enable_bitmapscan = off', 'jit = off'] LOOP
        EXECUTE format('ALTER FUNCTION outbox_prune_processed_events(bigint, integer, interval, boolean) SET %s', setting);
    END LOOP;
END
$$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION outbox_prune_processed_events(from_page bigint, batch integer, older_than interval, rehearsal boolean,
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

-- +goose StatementBegin
DO $$
DECLARE
    setting text;
BEGIN
    EXECUTE format('ALTER FUNCTION outbox_prune_processed_events(bigint, integer, interval, boolean) SET search_path = %I, pg_temp', current_schema());
    FOREACH setting IN ARRAY ARRAY [
        'TimeZone = UTC', 'DateStyle = ISO', 'lock_timeout = ''200ms''',
        'enable_seqscan = off', 'enable_hashjoin = off', 'enable_mergejoin = off', 'enable_bitmapscan = off', 'jit = off'] LOOP
        EXECUTE format('ALTER FUNCTION outbox_prune_processed_events(bigint, integer, interval, boolean) SET %s', setting);
    END LOOP;
END
$$;
-- +goose StatementEnd
