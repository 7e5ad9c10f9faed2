-- A delivery that waits behind the head of its ordering key leaves the index of what is due, so that no claim reads past it.
-- See docs/decisions/0067-blocked-deliveries-leave-the-due-index.md.

-- +goose Up
ALTER TABLE outbox_delivery ADD COLUMN blocked_by bigint;
COMMENT ON COLUMN outbox_delivery.blocked_by IS
    'The event of its ordering key behind which a pending delivery waits. Claims do not see it until that event is delivered or discarded. NULL: it waits for nothing but its time.';
-- The next file builds an index of this name.
ALTER INDEX outbox_delivery_due RENAME TO outbox_delivery_pending;

CREATE OR REPLACE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 12';

-- +goose Down
CREATE OR REPLACE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 4';
ALTER INDEX outbox_delivery_pending RENAME TO outbox_delivery_due;
ALTER TABLE outbox_delivery DROP COLUMN blocked_by;
