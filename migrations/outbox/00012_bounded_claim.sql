-- What a claim reads does not depend on the history of an ordering key, nor on what is parked.

-- +goose Up
-- Pending deliveries alone: a key with 100,000 failed deliveries that its destination skips would be read from the oldest one
-- at each claim. A failed head that blocks its key is looked up in outbox_delivery_blocked.
DROP INDEX outbox_delivery_order;
CREATE INDEX outbox_delivery_order ON outbox_delivery (destination, ordering_key, event_id)
    WHERE ordering_key IS NOT NULL AND status = 'pending';

-- What waits for an operator or for a route, by the order of its events.
DROP INDEX outbox_delivery_failed;
CREATE INDEX outbox_delivery_aside ON outbox_delivery (destination, event_id)
    WHERE status = 'failed' OR status = 'pending' AND destination = '';

-- ANALYZE while few distinct keys are pending would make the primary key look like the way to the head of a key.
ALTER TABLE outbox_delivery ALTER COLUMN ordering_key SET (n_distinct = -0.9);

ALTER TABLE outbox_destination
    ADD COLUMN reordered    bigint NOT NULL DEFAULT 0,
    ADD COLUMN parked_after bigint;
COMMENT ON COLUMN outbox_destination.reordered IS 'Grows whenever deliveries of earlier events become pending again: by a replay, or because they were parked. Relays then forget up to which event an ordering key is settled.';
COMMENT ON COLUMN outbox_destination.parked_after IS 'A route to the destination was added: parked deliveries up to this event have been looked through for it, those behind it not yet. NULL: all have.';

-- A route was added, by a relay or by hand: what was parked before is looked through from the start.
-- +goose StatementBegin
CREATE FUNCTION outbox_route_added() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO outbox_destination AS d (destination, parked_after)
    SELECT DISTINCT r.destination, 0::bigint FROM new_route r
    ON CONFLICT (destination) DO UPDATE SET parked_after = 0;
    RETURN NULL;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
DO $$
BEGIN
    EXECUTE pg_catalog.format('ALTER FUNCTION outbox_route_added() SET search_path = %I, pg_temp', current_schema());
END
$$;
-- +goose StatementEnd

CREATE TRIGGER outbox_route_added AFTER INSERT ON outbox_route
    REFERENCING NEW TABLE AS new_route FOR EACH STATEMENT EXECUTE FUNCTION outbox_route_added();

-- Routes that were added before this migration.
INSERT INTO outbox_destination AS d (destination, parked_after)
SELECT DISTINCT r.destination, 0::bigint FROM outbox_route r
WHERE EXISTS (SELECT FROM outbox_delivery p WHERE p.destination = '' AND p.status = 'pending')
ON CONFLICT (destination) DO UPDATE SET parked_after = 0;

-- +goose Down
DROP TRIGGER outbox_route_added ON outbox_route;
DROP FUNCTION outbox_route_added();
ALTER TABLE outbox_destination DROP COLUMN reordered, DROP COLUMN parked_after;
ALTER TABLE outbox_delivery ALTER COLUMN ordering_key RESET (n_distinct);
DROP INDEX outbox_delivery_aside;
CREATE INDEX outbox_delivery_failed ON outbox_delivery (destination, event_id) WHERE status = 'failed';
DROP INDEX outbox_delivery_order;
CREATE INDEX outbox_delivery_order ON outbox_delivery (destination, ordering_key, event_id)
    WHERE ordering_key IS NOT NULL AND status IN ('pending', 'failed');
