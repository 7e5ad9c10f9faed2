-- What relays say of themselves and of the archive, so that status and alerts can tell it. The locks are taken in the order of relays.

-- +goose Up
ALTER TABLE outbox_watch
    ADD COLUMN salt          uuid        NOT NULL DEFAULT gen_random_uuid(),
    -- When the archive last ran to its end, and why it did not since.
    ADD COLUMN archived_at   timestamptz NOT NULL DEFAULT now(),
    ADD COLUMN archive_error text;

-- What a relay refused when it was to read its configuration again; NULL: it uses what is configured.
ALTER TABLE outbox_relay ADD COLUMN reload_error text, ADD COLUMN reload_failed_at timestamptz;

-- A salted digest of the settings, and one of the secrets, that a relay has for a destination. They are too short to tell a secret by.
ALTER TABLE outbox_relay_destination ADD COLUMN settings text NOT NULL DEFAULT '', ADD COLUMN secrets text NOT NULL DEFAULT '';

-- +goose Down
ALTER TABLE outbox_watch DROP COLUMN salt, DROP COLUMN archived_at, DROP COLUMN archive_error;
ALTER TABLE outbox_relay DROP COLUMN reload_error, DROP COLUMN reload_failed_at;
ALTER TABLE outbox_relay_destination DROP COLUMN settings, DROP COLUMN secrets;
