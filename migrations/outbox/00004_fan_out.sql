-- Routing and fan-out happen in the producer's transaction: an event and its deliveries commit together or not at all.

-- +goose Up
-- +goose StatementBegin
CREATE FUNCTION outbox_fan_out() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    -- Not the transaction's start: an event that becomes due long before it commits would lie behind
    -- the position from which relays claim, and wait for their next sweep.
    inserted_at timestamptz := clock_timestamp();
BEGIN
    INSERT INTO outbox_delivery (event_id, destination, next_attempt_at, ordering_key, payload_bytes)
    SELECT DISTINCT e.id, coalesce(r.destination, ''), greatest(e.available_at, inserted_at), e.ordering_key,
           octet_length(e.payload::text)
    FROM new_event e LEFT JOIN outbox_route r ON e.event_type LIKE r.like_pattern;

    -- FOUND: a duplicate that inserted nothing wakes nobody. A producer whose transactions are prepared (two-phase
    -- commit), where NOTIFY is not allowed, sets outbox.notify to off; relays then find its events by polling.
    IF FOUND AND coalesce(current_setting('outbox.notify', true), '') <> 'off'
       AND EXISTS (SELECT FROM outbox_relay WHERE idle AND heartbeat_at > now() - interval '10 seconds') THEN
        PERFORM pg_notify('outbox_wake', TG_TABLE_SCHEMA);
    END IF;
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- A producer needs no right beyond INSERT on outbox: the function runs with its owner's rights, in a fixed search_path.
-- +goose StatementBegin
DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION outbox_fan_out() SET search_path = %I, pg_temp', current_schema());
END
$$;
-- +goose StatementEnd

REVOKE ALL ON FUNCTION outbox_fan_out() FROM PUBLIC;

CREATE TRIGGER outbox_fan_out AFTER INSERT ON outbox
    REFERENCING NEW TABLE AS new_event FOR EACH STATEMENT EXECUTE FUNCTION outbox_fan_out();

-- +goose Down
DROP TRIGGER outbox_fan_out ON outbox;
DROP FUNCTION outbox_fan_out();
