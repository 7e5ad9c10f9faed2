-- +goose NO TRANSACTION
-- The index by which relays find the events of new transactions. It grows at its end. It is built beside producers and relays.
-- Its condition keeps it from the lookup of an event by its id, for which a plan that was made on an empty table would read all of it.

-- +goose Up
DROP INDEX CONCURRENTLY IF EXISTS outbox_by_xid;
CREATE INDEX CONCURRENTLY outbox_by_xid ON outbox (xid, id) WHERE xid > '2';

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS outbox_by_xid;
