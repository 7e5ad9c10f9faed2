-- A relay's session shows that the relay lives. Any login of the database could hold, or queue for, the advisory lock that
-- showed it before: relays could not register, and claims of dead ones were not rescued.

-- +goose Up
ALTER TABLE outbox_relay
    DROP COLUMN session_lock,
    ADD COLUMN session_pid       integer,
    ADD COLUMN server_started_at timestamptz NOT NULL DEFAULT pg_postmaster_start_time();
COMMENT ON TABLE outbox_relay IS 'Live relays. A row belongs to a dead relay when its session is gone, when its heartbeat is older than 15 seconds or, without a session, older than its lease. Its claims end with the row.';
COMMENT ON COLUMN outbox_relay.session_pid IS 'The backend of the relay''s session, whose application_name is ''outbox-relay session '' and the instance. Null, behind a pooler: only an old heartbeat says that the relay is dead.';
COMMENT ON COLUMN outbox_relay.server_started_at IS 'When the server of the session started. A copy of this row on another server has no session there.';
COMMENT ON COLUMN outbox_relay.lease IS 'For how long the claims of the relay hold. Without a session, also after how long without a heartbeat it is dead.';

-- Relays of earlier versions write a column that is gone, and would not see which relays live.
CREATE OR REPLACE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 18';

-- +goose Down
CREATE OR REPLACE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 16';
COMMENT ON COLUMN outbox_relay.lease IS 'For how long the claims of the relay hold. Without session_lock, also after how long without a heartbeat it is dead.';
ALTER TABLE outbox_relay
    DROP COLUMN session_pid,
    DROP COLUMN server_started_at,
    ADD COLUMN session_lock boolean NOT NULL DEFAULT true;
COMMENT ON COLUMN outbox_relay.session_lock IS 'Whether the relay holds an advisory lock while it lives; if not, only an old heartbeat says that it is dead.';
COMMENT ON TABLE outbox_relay IS 'Live relays. A row belongs to a dead relay when its advisory lock is free, when its heartbeat is older than 15 seconds or, without session_lock, older than its lease. Its claims end with the row.';
