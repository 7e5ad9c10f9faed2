-- What a destination has asked a relay for, so that status can say it.

-- +goose Up
-- Until when it asked the relay to wait (Retry-After), and to how many requests a second its 429s have slowed the relay; NULL: it has not.
ALTER TABLE outbox_relay_destination ADD COLUMN wait_until timestamptz, ADD COLUMN slowed_to float8;

-- +goose Down
ALTER TABLE outbox_relay_destination DROP COLUMN wait_until, DROP COLUMN slowed_to;
