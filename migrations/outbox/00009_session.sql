-- Relays behind a transaction pooler hold no session lock: their heartbeat and their leases say whether they live.

-- +goose Up
ALTER TABLE outbox_relay ADD COLUMN session_lock boolean NOT NULL DEFAULT true;
COMMENT ON COLUMN outbox_relay.session_lock IS 'Whether the relay holds an advisory lock while it lives; if not, only an old heartbeat says that it is dead.';

-- +goose Down
ALTER TABLE outbox_relay DROP COLUMN session_lock;
