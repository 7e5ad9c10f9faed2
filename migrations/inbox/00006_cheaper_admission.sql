-- What every event pays for is what its statement prepares anew each time, constraints among it. The memory is no state
-- machine: its states are written by the package consumer alone, and an inbox's are checked where they change, in inbox_events.
-- Keys and hashes are made by the package as well.

-- +goose Up
ALTER TABLE processed_events
    DROP CONSTRAINT processed_events_state_is_known,
    DROP CONSTRAINT processed_events_key_is_1_to_255_bytes,
    DROP CONSTRAINT processed_events_payload_hash_is_sha256;

-- +goose Down
ALTER TABLE processed_events
    ADD CONSTRAINT processed_events_state_is_known
        CHECK (processing_state IN ('pending', 'processing', 'succeeded', 'ignored', 'failed')),
    ADD CONSTRAINT processed_events_key_is_1_to_255_bytes CHECK (octet_length(idempotency_key) BETWEEN 1 AND 255),
    ADD CONSTRAINT processed_events_payload_hash_is_sha256 CHECK (octet_length(payload_hash) = 32);
