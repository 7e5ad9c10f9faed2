-- Of a first answer its status is kept. No sender needs the rest again, and what is personal in it has no place here.

-- +goose Up
ALTER TABLE processed_events DROP COLUMN response_headers, DROP COLUMN response_body;

-- +goose Down
ALTER TABLE processed_events ADD COLUMN response_headers jsonb, ADD COLUMN response_body bytea;
UPDATE processed_events SET response_headers = '{}', response_body = '' WHERE response_status IS NOT NULL;
