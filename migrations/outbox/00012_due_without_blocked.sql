-- +goose NO TRANSACTION
-- The indexes for blocked_by. They are built beside producers and relays.

-- +goose Up
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_due;
-- The one hot index. No column that a claim writes stands in it, except for a delivery that was blocked.
CREATE INDEX CONCURRENTLY outbox_delivery_due ON outbox_delivery (destination, replay, next_attempt_at, event_id)
    WHERE status = 'pending' AND blocked_by IS NULL;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_waiting;
-- What waits behind a head, and which heads there are.
CREATE INDEX CONCURRENTLY outbox_delivery_waiting ON outbox_delivery (destination, blocked_by, event_id)
    WHERE status = 'pending' AND blocked_by IS NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_pending;

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_pending;
CREATE INDEX CONCURRENTLY outbox_delivery_pending ON outbox_delivery (destination, replay, next_attempt_at, event_id) WHERE status = 'pending';
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_waiting;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_due;
