-- The inbox mode: events that are recorded with their payload, and worked later.
--
-- Every column is nullable or has a constant default, so none rewrites the table.

-- +goose Up
ALTER TABLE processed_events
    -- Grows with recording; NULL for events that the middleware processed.
    ADD COLUMN inbox_id        bigint,
    -- What the sender says: the event's id in its outbox, its place among the events of one ordering key, and until when
    -- it may send the event again.
    ADD COLUMN event_id        bigint,
    ADD COLUMN ordering_key    text COLLATE "C",
    ADD COLUMN sequence        bigint NOT NULL DEFAULT 0,
    ADD COLUMN not_after       timestamptz,
    -- The verified headers of the request, of which a worker makes the event again.
    ADD COLUMN request_headers jsonb,
    -- The fence: grows with every claim, stands in the WHERE of whatever a worker writes. A pending event without
    -- next_attempt_at waits for an earlier one of its ordering key.
    ADD COLUMN claim           bigint NOT NULL DEFAULT 0,
    ADD COLUMN claimed_by      text,
    ADD COLUMN claimed_at      timestamptz,
    -- How often in a row its work was cut off before the handler had an outcome: its worker died, or the database was in
    -- the way. An event that kills its workers must not do so for ever.
    ADD COLUMN interruptions   integer NOT NULL DEFAULT 0;

CREATE SEQUENCE inbox_id_seq AS bigint OWNED BY processed_events.inbox_id;

-- +goose Down
ALTER TABLE processed_events
    DROP COLUMN inbox_id,
    DROP COLUMN event_id,
    DROP COLUMN ordering_key,
    DROP COLUMN sequence,
    DROP COLUMN not_after,
    DROP COLUMN request_headers,
    DROP COLUMN claim,
    DROP COLUMN claimed_by,
    DROP COLUMN claimed_at,
    DROP COLUMN interruptions;
