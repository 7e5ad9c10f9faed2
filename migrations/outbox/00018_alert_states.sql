-- What an alert is in is decided from its row and a channel's notice alone: when it began or returned, when it ended, what the channel
-- was sent. Relays read these again as they did before; alerts that are open are sent once more.

-- +goose Up
ALTER TABLE outbox_alert
    DROP COLUMN recovered_at,
    -- How often the condition returned soon after its end, since began_at.
    ADD COLUMN returned        integer     NOT NULL DEFAULT 0,
    ADD COLUMN began_at        timestamptz NOT NULL DEFAULT now(),
    -- Who has seen it: it is not repeated until it returns.
    ADD COLUMN acknowledged_by text;

DELETE FROM outbox_alert_notice;

ALTER TABLE outbox_alert_notice
    DROP COLUMN count, DROP COLUMN recovered_count, DROP COLUMN notified_at,
    -- When the channel was last sent that the condition lasts, and how bad it was; NULL again once its recovery was sent.
    ADD COLUMN sent_at    timestamptz,
    ADD COLUMN sent_level bigint NOT NULL DEFAULT 0;

UPDATE outbox_alert SET due_at = now();

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION outbox_alert_changed() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF OLD.resolved_at IS NOT NULL AND (NEW.resolved_at IS NULL OR NEW.count > OLD.count) THEN -- it returns
        NEW.count := greatest(NEW.count, OLD.count + 1);
        NEW.counted_before := OLD.count;
        NEW.opened_at := greatest(OLD.resolved_at, CASE WHEN NEW.opened_at = OLD.opened_at THEN now() ELSE NEW.opened_at END);
        NEW.resolved_at := NULL;
        NEW.returned := OLD.returned + 1;
        NEW.acknowledged_by := NULL;
        NEW.due_at := now();
    ELSIF NEW.resolved_at IS NOT NULL AND OLD.resolved_at IS NULL THEN
        NEW.due_at := now();
    END IF;
    RETURN NEW;
END
$$;
-- +goose StatementEnd

-- What operators keep from being sent for a while, as during maintenance. An empty rule or subject stands for all.
CREATE TABLE outbox_alert_silence (
    rule       text COLLATE "C" NOT NULL,
    subject    text COLLATE "C" NOT NULL,
    until      timestamptz      NOT NULL,
    reason     text             NOT NULL DEFAULT '',
    created_by text             NOT NULL,
    created_at timestamptz      NOT NULL DEFAULT now(),
    PRIMARY KEY (rule, subject)
);

COMMENT ON TABLE outbox_alert_silence IS 'Alerts that are not sent until a time. An empty rule or subject stands for all.';

-- +goose Down
DROP TABLE outbox_alert_silence;
DELETE FROM outbox_alert_notice;
ALTER TABLE outbox_alert_notice
    DROP COLUMN sent_at, DROP COLUMN sent_level, ADD COLUMN count bigint NOT NULL DEFAULT 0, ADD COLUMN recovered_count bigint NOT NULL DEFAULT 0,
    ADD COLUMN notified_at timestamptz;
ALTER TABLE outbox_alert DROP COLUMN returned, DROP COLUMN began_at, DROP COLUMN acknowledged_by, ADD COLUMN recovered_at timestamptz;

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION outbox_alert_changed() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.resolved_at IS NULL AND OLD.resolved_at IS NOT NULL AND NEW.count = OLD.count THEN
        NEW.count := OLD.count + 1;
    END IF;
    IF NEW.count > OLD.count THEN
        NEW.resolved_at := NULL; -- it has fired again, whether or not the statement says so
        IF OLD.recovered_at IS NOT NULL THEN
            NEW.opened_at := now();
            NEW.counted_before := OLD.count;
            NEW.recovered_at := NULL;
        END IF;
        NEW.due_at := now();
    ELSIF NEW.resolved_at IS NOT NULL AND OLD.resolved_at IS NULL THEN
        NEW.due_at := now();
    END IF;
    RETURN NEW;
END
$$;
-- +goose StatementEnd
