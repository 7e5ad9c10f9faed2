-- A rescue that costs the same whatever is pending, and a sign for producers that leaves no row versions.

-- +goose Up
-- Claims that ended before their lease. A rescue writes one row here instead of changing every delivery: it would have to
-- search all that is pending for them, because no index may hold claimed_by (the claim would not stay heap-only).
CREATE TABLE outbox_void (
    instance integer     NOT NULL,
    -- Which claims of the relay: those whose lease ends in this range. Afterwards the lease says the same.
    after    timestamptz NOT NULL,
    until    timestamptz NOT NULL,
    -- Whether the relay died with them. Only then may a delivery have killed it.
    died     boolean     NOT NULL,
    PRIMARY KEY (instance, until)
);
COMMENT ON TABLE outbox_void IS 'Claims that no longer hold although their lease lasts: of relays that died or left, or claims whose acknowledgement was lost.';
COMMENT ON COLUMN outbox_relay.lease IS 'For how long the claims of the relay hold. Without session_lock, also after how long without a heartbeat it is dead.';
COMMENT ON TABLE outbox_relay IS 'Live relays. A row belongs to a dead relay when its advisory lock is free, when its heartbeat is older than 15 seconds or, without session_lock, older than its lease. Its claims end with the row.';
COMMENT ON COLUMN outbox_delivery.rescues IS 'Claims lost to a dead relay since the last settle and, from the sixth on, requests sent alone that were never settled; at a limit the delivery is failed as crash_loop.';
COMMENT ON TABLE outbox_rescue IS 'Relays that were found dead in the last day.';
ALTER TABLE outbox_rescue DROP COLUMN deliveries;

-- Until when relays want to be notified, in milliseconds since 1970. A sequence is one row that is written in place:
-- whatever blocks vacuum, it costs producers the same to read.
CREATE SEQUENCE outbox_armed MINVALUE 0 START 0;

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION outbox_fan_out() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    -- Not the transaction's start: an event that becomes due long before it commits would lie behind
    -- the position from which relays claim, and wait for their next sweep.
    inserted_at timestamptz := clock_timestamp();
BEGIN
    INSERT INTO outbox_delivery (event_id, destination, next_attempt_at, ordering_key, payload_bytes)
    SELECT DISTINCT e.id, coalesce(r.destination, ''), greatest(e.available_at, inserted_at), e.ordering_key,
           octet_length(e.payload::text)
    FROM new_event e LEFT JOIN outbox_route r ON e.event_type LIKE r.like_pattern;

    -- FOUND: a duplicate that inserted nothing wakes no relay. A producer whose transactions are prepared (two-phase
    -- commit), where NOTIFY is not allowed, sets outbox.notify to off; relays then find its events by polling.
    IF FOUND AND coalesce(current_setting('outbox.notify', true), '') <> 'off'
       AND (SELECT last_value FROM outbox_armed) > extract(epoch FROM inserted_at) * 1000 THEN
        PERFORM pg_notify('outbox_wake', TG_TABLE_SCHEMA);
    END IF;
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- Replacing a function drops its settings.
-- +goose StatementBegin
DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION outbox_fan_out() SET search_path = %I, pg_temp', current_schema());
END
$$;
-- +goose StatementEnd

ALTER TABLE outbox_relay DROP COLUMN idle;

-- +goose Down
ALTER TABLE outbox_relay ADD COLUMN idle boolean NOT NULL DEFAULT false;

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION outbox_fan_out() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    -- Not the transaction's start: an event that becomes due long before it commits would lie behind
    -- the position from which relays claim, and wait for their next sweep.
    inserted_at timestamptz := clock_timestamp();
BEGIN
    INSERT INTO outbox_delivery (event_id, destination, next_attempt_at, ordering_key, payload_bytes)
    SELECT DISTINCT e.id, coalesce(r.destination, ''), greatest(e.available_at, inserted_at), e.ordering_key,
           octet_length(e.payload::text)
    FROM new_event e LEFT JOIN outbox_route r ON e.event_type LIKE r.like_pattern;

    -- FOUND: a duplicate that inserted nothing wakes no relay. A producer whose transactions are prepared (two-phase
    -- commit), where NOTIFY is not allowed, sets outbox.notify to off; relays then find its events by polling.
    IF FOUND AND coalesce(current_setting('outbox.notify', true), '') <> 'off'
       AND EXISTS (SELECT FROM outbox_relay WHERE idle AND heartbeat_at > now() - interval '10 seconds') THEN
        PERFORM pg_notify('outbox_wake', TG_TABLE_SCHEMA);
    END IF;
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION outbox_fan_out() SET search_path = %I, pg_temp', current_schema());
END
$$;
-- +goose StatementEnd

DROP SEQUENCE outbox_armed;
ALTER TABLE outbox_rescue ADD COLUMN deliveries integer NOT NULL DEFAULT 0;
COMMENT ON TABLE outbox_rescue IS 'Relays that were found dead in the last day, and how many deliveries were given back.';
COMMENT ON COLUMN outbox_delivery.rescues IS 'Claims lost to a dead relay since the last settle; at a limit the delivery is failed as crash_loop.';
COMMENT ON TABLE outbox_relay IS 'Live relays. A row belongs to a dead relay when its advisory lock is free or, without session_lock, its heartbeat is older than its lease: then its claims are given back.';
COMMENT ON COLUMN outbox_relay.lease IS 'After how long without a heartbeat a relay without session_lock is dead: as long as its claims hold.';
DROP TABLE outbox_void;
