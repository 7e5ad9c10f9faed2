-- Relays of outboxes in which nothing happens.

-- +goose Up
ALTER TABLE outbox_relay ADD COLUMN asleep boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN outbox_relay.asleep IS 'Nothing of the relay runs: a connection that outboxes share writes its heartbeat twice a minute and listens for it.';

-- +goose Down
ALTER TABLE outbox_relay DROP COLUMN asleep;
