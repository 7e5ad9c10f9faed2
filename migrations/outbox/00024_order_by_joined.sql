-- +goose NO TRANSACTION
-- The indexes for joined. They are built beside producers and relays.

-- +goose Up
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_order;
CREATE INDEX CONCURRENTLY outbox_delivery_order ON outbox_delivery (destination, ordering_key, joined, event_id)
    WHERE status = 'pending' AND ordering_key IS NOT NULL AND joined IS NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_scheduled;
-- What has not joined its key yet. No claim reads it in front of what is due.
CREATE INDEX CONCURRENTLY outbox_delivery_scheduled ON outbox_delivery (destination, ordering_key, next_attempt_at, event_id)
    WHERE status = 'pending' AND ordering_key IS NOT NULL AND joined IS NULL;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_blocked;
CREATE INDEX CONCURRENTLY outbox_delivery_blocked ON outbox_delivery (destination, ordering_key, joined, event_id)
    WHERE status = 'failed' AND ordering_key IS NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_order_by_event;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_blocked_by_event;

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_order_by_event;
CREATE INDEX CONCURRENTLY outbox_delivery_order_by_event ON outbox_delivery (destination, ordering_key, event_id)
    WHERE ordering_key IS NOT NULL AND status = 'pending';
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_blocked_by_event;
CREATE INDEX CONCURRENTLY outbox_delivery_blocked_by_event ON outbox_delivery (destination, ordering_key, event_id)
    WHERE ordering_key IS NOT NULL AND status = 'failed';
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_blocked;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_scheduled;
DROP INDEX CONCURRENTLY IF EXISTS outbox_delivery_order;
