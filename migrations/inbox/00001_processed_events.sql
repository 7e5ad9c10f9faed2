-- The receiver's memory: one row per event it has processed, written in the same transaction as the effect.

-- +goose Up
CREATE TABLE processed_events (
    source            text COLLATE "C" NOT NULL,
    idempotency_key   text COLLATE "C" NOT NULL,
    event_type        text             NOT NULL DEFAULT '',
    event_version     integer          NOT NULL DEFAULT 1,
    related_reference text,
    processing_state  text COLLATE "C" NOT NULL,
    -- SHA-256 of the body, to tell a duplicate from a reused key. NULL for events of a transport without bytes to compare.
    payload_hash      bytea,
    received_at       timestamptz      NOT NULL DEFAULT now(),
    processed_at      timestamptz,
    attempts          integer          NOT NULL DEFAULT 1,
    next_attempt_at   timestamptz,
    last_error        text,
    response_status   smallint,
    response_headers  jsonb,
    response_body     bytea,
    payload           bytea,
    CONSTRAINT processed_events_pkey PRIMARY KEY (source, idempotency_key),
    CONSTRAINT processed_events_state_is_known
        CHECK (processing_state IN ('pending', 'processing', 'succeeded', 'ignored', 'failed')),
    CONSTRAINT processed_events_key_is_1_to_255_bytes CHECK (octet_length(idempotency_key) BETWEEN 1 AND 255),
    CONSTRAINT processed_events_payload_hash_is_sha256 CHECK (octet_length(payload_hash) = 32)
);

COMMENT ON TABLE processed_events IS 'Events this receiver has processed, by sender and idempotency key: the memory that suppresses duplicates.';

-- +goose Down
DROP TABLE processed_events;
