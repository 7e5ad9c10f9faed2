-- What a destination answers to one relay while others may be accepted there.

-- +goose Up
-- Since when the destination refuses this relay, and what it answers; NULL: it does not, or all relays hold the destination.
ALTER TABLE outbox_relay_destination ADD COLUMN refused_at timestamptz, ADD COLUMN refused_error text;

-- +goose Down
ALTER TABLE outbox_relay_destination DROP COLUMN refused_at, DROP COLUMN refused_error;
