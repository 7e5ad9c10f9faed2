-- An event joins the order of its key when it becomes due. Before that it holds no other event.
-- See docs/decisions/0072-an-event-joins-its-key-when-it-is-due.md.

-- +goose Up
ALTER TABLE outbox_delivery ADD COLUMN joined bigint DEFAULT 0;
COMMENT ON COLUMN outbox_delivery.joined IS
    'The place in the order of the ordering key, before event_id. 0: the event was due when a relay took it. NULL: it has not joined its key yet, and holds no other event. Otherwise 2^22 times the number of a range, and a number behind it.';
-- The next file builds indexes of these names.
ALTER INDEX outbox_delivery_order RENAME TO outbox_delivery_order_by_event;
ALTER INDEX outbox_delivery_blocked RENAME TO outbox_delivery_blocked_by_event;

-- +goose StatementBegin
DO $do$
DECLARE
    change record;
    before text;
BEGIN
    FOR change IN SELECT * FROM (VALUES
        ('outbox_cover_events', '(event_id, destination, next_attempt_at,', '(event_id, destination, joined, next_attempt_at,'),
        ('outbox_cover_events', 'greatest(e.available_at, inserted_at)',
         'CASE WHEN e.ordering_key IS NULL OR e.available_at <= inserted_at THEN 0 END, greatest(e.available_at, inserted_at)'),
        ('outbox_create_deliveries', '(event_id, destination, next_attempt_at,', '(event_id, destination, joined, next_attempt_at,'),
        ('outbox_create_deliveries', 'greatest(e.available_at, inserted_at)',
         'CASE WHEN e.ordering_key IS NULL OR e.available_at <= inserted_at THEN 0 END, greatest(e.available_at, inserted_at)'),
        ('outbox_release_parked', '(event_id, destination, next_attempt_at, ordering_key, payload_bytes)
        SELECT DISTINCT g.event_id, r.destination, greatest(',
         '(event_id, destination, joined, next_attempt_at, ordering_key, payload_bytes)
        SELECT DISTINCT g.event_id, r.destination, CASE WHEN g.ordering_key IS NULL OR g.next_attempt_at <= now() THEN 0 END, greatest(')) c (name, was, becomes)
    LOOP
        before := pg_catalog.pg_get_functiondef(change.name::regproc);
        IF pg_catalog.strpos(before, change.was) = 0 THEN
            RAISE EXCEPTION 'outbox: the function % is not that of the migrations', change.name;
        END IF;
        EXECUTE pg_catalog.replace(before, change.was, change.becomes);
    END LOOP;
END
$do$;
-- +goose StatementEnd

UPDATE outbox_delivery SET joined = NULL
WHERE status = 'pending' AND ordering_key IS NOT NULL AND next_attempt_at > now() AND attempts = 0 AND last_attempt_at IS NULL AND NOT replay;

-- Relays of earlier versions would write rows without a place, and claim by an order of their own.
CREATE OR REPLACE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 24';

-- +goose Down
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
ALTER INDEX outbox_delivery_blocked_by_event RENAME TO outbox_delivery_blocked;
ALTER INDEX outbox_delivery_order_by_event RENAME TO outbox_delivery_order;
ALTER TABLE outbox_delivery DROP COLUMN joined;
