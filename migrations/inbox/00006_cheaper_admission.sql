-- What every event pays for is what its statement prepares anew each time, constraints among it. Whoever writes a state by hand
-- is stopped by a trigger, which the receivers' INSERT does not meet; keys and hashes are made by the package consumer.
--
-- And an event less than a day old need not be looked up in inbox_forgotten, because that never speaks of the last day.

-- +goose Up
-- +goose StatementBegin
CREATE FUNCTION inbox_refuse_state() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'inbox: % is not a state of an event', quote_nullable(NEW.processing_state)
        USING ERRCODE = 'check_violation', HINT = 'It is pending, processing, succeeded, ignored or failed.';
END
$$;
-- +goose StatementEnd

CREATE TRIGGER processed_events_state_is_known BEFORE UPDATE OF processing_state ON processed_events
    FOR EACH ROW WHEN (NEW.processing_state NOT IN ('pending', 'processing', 'succeeded', 'ignored', 'failed'))
    EXECUTE FUNCTION inbox_refuse_state();

ALTER TABLE processed_events
    DROP CONSTRAINT processed_events_state_is_known,
    DROP CONSTRAINT processed_events_key_is_1_to_255_bytes,
    DROP CONSTRAINT processed_events_payload_hash_is_sha256;

-- To announce something younger is refused from now on. What somebody has announced so far settles again, a day later.
UPDATE inbox_forgotten SET announced_at = received_before + interval '1 day' WHERE received_before > announced_at - interval '1 day';
ALTER TABLE inbox_forgotten
    ADD CONSTRAINT inbox_forgotten_keeps_the_last_day CHECK (received_before <= announced_at - interval '1 day');

-- +goose Down
ALTER TABLE inbox_forgotten DROP CONSTRAINT inbox_forgotten_keeps_the_last_day;
ALTER TABLE processed_events
    ADD CONSTRAINT processed_events_state_is_known
        CHECK (processing_state IN ('pending', 'processing', 'succeeded', 'ignored', 'failed')),
    ADD CONSTRAINT processed_events_key_is_1_to_255_bytes CHECK (octet_length(idempotency_key) BETWEEN 1 AND 255),
    ADD CONSTRAINT processed_events_payload_hash_is_sha256 CHECK (octet_length(payload_hash) = 32);
DROP TRIGGER processed_events_state_is_known ON processed_events;
DROP FUNCTION inbox_refuse_state();
