-- A large insert for one destination must not hold up the events of the others. While relays take a difference that was cut, events
-- that came after it get rows of their own. See docs/decisions/0069-intake-by-snapshot-difference.md.

-- +goose Up
ALTER TABLE outbox_range ADD COLUMN beyond boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN outbox_range.beyond IS 'Events that are not visible in target may have rows already. A take leaves these out.';

-- +goose Down
ALTER TABLE outbox_range DROP COLUMN beyond;
