-- Alerts that are told once when they fire and once when they are resolved.

-- +goose Up
ALTER TABLE outbox_alert
    ADD COLUMN resolved_at timestamptz,
    ADD COLUMN detail      text;
COMMENT ON COLUMN outbox_alert.resolved_at IS 'When what the alert is about ended; the row goes once that has been told.';

-- +goose Down
ALTER TABLE outbox_alert DROP COLUMN resolved_at, DROP COLUMN detail;
