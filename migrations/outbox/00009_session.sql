-- Relays behind a transaction pooler hold no session lock: their heartbeat and their leases say whether they live. And
-- which versions of the program work with this schema, so that old and new relays can run side by side during a deploy.

-- +goose Up
ALTER TABLE outbox_relay
    ADD COLUMN session_lock boolean  NOT NULL DEFAULT true,
    ADD COLUMN lease        interval NOT NULL DEFAULT '60 seconds';
COMMENT ON TABLE outbox_relay IS 'Live relays. A row belongs to a dead relay when its advisory lock is free or, without session_lock, its heartbeat is older than its lease: then its claims are given back.';
COMMENT ON COLUMN outbox_relay.session_lock IS 'Whether the relay holds an advisory lock while it lives; if not, only an old heartbeat says that it is dead.';
COMMENT ON COLUMN outbox_relay.lease IS 'After how long without a heartbeat a relay without session_lock is dead: as long as its claims hold.';

-- A later migration that programs of an earlier version cannot work with replaces this function; one that only adds
-- leaves it as it is.
CREATE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 9';
COMMENT ON FUNCTION outbox_compatible_since() IS 'The oldest schema version whose programs work with this schema.';

-- +goose Down
DROP FUNCTION outbox_compatible_since();
ALTER TABLE outbox_relay DROP COLUMN session_lock, DROP COLUMN lease;
COMMENT ON TABLE outbox_relay IS 'Live relays. A row whose advisory lock is free belongs to a dead relay: its claims are given back.';
