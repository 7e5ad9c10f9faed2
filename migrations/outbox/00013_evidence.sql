-- The evidence against a destination is shared by all relays and outlives each: at a quiet destination one relay alone,
-- or one that is restarted between two attempts, never sees enough of it.

-- +goose Up
ALTER TABLE outbox_destination
    ADD COLUMN breaker_failures integer  NOT NULL DEFAULT 0,
    ADD COLUMN breaker_events   bigint[] NOT NULL DEFAULT '{}',
    ADD CONSTRAINT outbox_destination_breaker_failures_is_positive CHECK (breaker_failures >= 0);

COMMENT ON COLUMN outbox_destination.breaker_failures IS
    'While the breaker is closed: failures of all relays against the destination, of which each answer takes back some. Only failures write it, and answers that follow them.';
COMMENT ON COLUMN outbox_destination.breaker_events IS
    'The first events that were answered with a failure; also while the breaker is open.';

-- +goose Down
ALTER TABLE outbox_destination DROP COLUMN breaker_failures, DROP COLUMN breaker_events;
