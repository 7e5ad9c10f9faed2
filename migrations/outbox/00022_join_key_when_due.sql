-- +goose NO TRANSACTION
-- An event joins the order of its key when it becomes due. Before that it holds no other event.
-- See docs/decisions/0072-an-event-joins-its-key-when-it-is-due.md. The indexes are built beside producers and relays.

-- +goose Up
ALTER TABLE outbox_delivery ADD COLUMN IF NOT EXISTS joined bigint DEFAULT 0;
COMMENT ON COLUMN outbox_delivery.joined IS
    'The place in the order of the ordering key, before event_id. 0: the event was due when a relay took it. NULL: it is not due yet, or no relay has joined it to its key since then. Otherwise 2^22 times the number of a range, and a number behind it.';

-- +goose StatementBegin
DO $do$
DECLARE
    change record;
    before text;
    was    text := 'coalesce(r.destination, ''''), greatest(e.available_at, inserted_at)';
    becomes text := 'coalesce(r.destination, ''''), CASE WHEN e.ordering_key IS NULL OR e.available_at <= inserted_at THEN 0 END, greatest(e.available_at, inserted_at)';
BEGIN
    FOR change IN SELECT * FROM (VALUES
        ('outbox_cover_events', was, becomes), ('outbox_create_deliveries', was, becomes),
        ('outbox_release_parked', 'r.destination, greatest(g.next_attempt_at, now())',
         'r.destination, CASE WHEN g.ordering_key IS NULL OR g.next_attempt_at <= now() THEN 0 END, greatest(g.next_attempt_at, now())')) c (name, was, becomes)
    LOOP
        before := pg_catalog.pg_get_functiondef(change.name::regproc);
        CONTINUE WHEN pg_catalog.strpos(before, change.becomes) > 0;
        IF pg_catalog.strpos(before, change.was) = 0 THEN
            RAISE EXCEPTION 'outbox: the function % is not that of the migrations', change.name;
        END IF;
        EXECUTE pg_catalog.replace(pg_catalog.replace(before, change.was, change.becomes),
            '(event_id, destination, next_attempt_at,', '(event_id, destination, joined, next_attempt_at,');
    END LOOP;
END
$do$;
-- +goose StatementEnd

-- Relays of earlier versions would write rows without a place, and claim by an order of their own.
CREATE OR REPLACE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 22';

UPDATE outbox_delivery SET joined = NULL
WHERE status = 'pending' AND ordering_key IS NOT NULL AND next_attempt_at > now() AND attempts = 0 AND last_attempt_at IS NULL AND NOT replay;

DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_scheduled;
-- What has not joined its key yet. No claim reads it in front of what is due.
CREATE INDEX CONCURRENTLY outbox_delivery_scheduled ON outbox_delivery (destination, ordering_key, next_attempt_at, event_id)
    WHERE status = 'pending' AND ordering_key IS NOT NULL AND joined IS NULL;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_order_new;
CREATE INDEX CONCURRENTLY outbox_delivery_order_new ON outbox_delivery (destination, ordering_key, joined, event_id)
    WHERE status = 'pending' AND ordering_key IS NOT NULL AND joined IS NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_order;
ALTER INDEX outbox_delivery_order_new RENAME TO outbox_delivery_order;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_blocked_new;
CREATE INDEX CONCURRENTLY outbox_delivery_blocked_new ON outbox_delivery (destination, ordering_key, joined, event_id)
    WHERE status = 'failed' AND ordering_key IS NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_blocked;
ALTER INDEX outbox_delivery_blocked_new RENAME TO outbox_delivery_blocked;

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_scheduled;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_order_old;
CREATE INDEX CONCURRENTLY outbox_delivery_order_old ON outbox_delivery (destination, ordering_key, event_id)
    WHERE ordering_key IS NOT NULL AND status = 'pending';
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_order;
ALTER INDEX outbox_delivery_order_old RENAME TO outbox_delivery_order;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_blocked_old;
CREATE INDEX CONCURRENTLY outbox_delivery_blocked_old ON outbox_delivery (destination, ordering_key, event_id)
    WHERE ordering_key IS NOT NULL AND status = 'failed';
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_blocked;
ALTER INDEX outbox_delivery_blocked_old RENAME TO outbox_delivery_blocked;
CREATE OR REPLACE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 15';
-- +goose StatementBegin
DO $do$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['outbox_cover_events', 'outbox_create_deliveries', 'outbox_release_parked'] LOOP
        EXECUTE pg_catalog.replace(pg_catalog.replace(pg_catalog.replace(pg_catalog.pg_get_functiondef(name::regproc),
            'CASE WHEN e.ordering_key IS NULL OR e.available_at <= inserted_at THEN 0 END, ', ''),
            'CASE WHEN g.ordering_key IS NULL OR g.next_attempt_at <= now() THEN 0 END, ', ''),
            '(event_id, destination, joined, next_attempt_at,', '(event_id, destination, next_attempt_at,');
    END LOOP;
END
$do$;
-- +goose StatementEnd
ALTER TABLE outbox_delivery DROP COLUMN IF EXISTS joined;
