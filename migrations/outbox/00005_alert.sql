-- What relays saw and did, for operators: alerts, the last look around the database, and the numbers behind charts.

-- +goose Up
-- A relay that sees a condition inserts (rule, subject) ON CONFLICT DO UPDATE SET count = count + 1; one that sees its end sets
-- resolved_at. The trigger below does the rest. What an alert is in is decided from its row and a channel's notice alone: when it
-- began or returned, when it ended, what the channel was sent.
CREATE TABLE outbox_alert (
    rule            text COLLATE "C" NOT NULL,
    subject         text COLLATE "C" NOT NULL,
    began_at        timestamptz      NOT NULL DEFAULT now(),
    -- When the present episode began.
    opened_at       timestamptz      NOT NULL DEFAULT now(),
    last_at         timestamptz      NOT NULL DEFAULT now(),
    resolved_at     timestamptz,
    -- When a relay should look at this row again; NULL: not before something happens to it.
    due_at          timestamptz      DEFAULT now(),
    count           bigint           NOT NULL DEFAULT 1,
    -- What the count was when the present episode began.
    counted_before  bigint           NOT NULL DEFAULT 0,
    notified_count  bigint           NOT NULL DEFAULT 0,
    -- How bad it was when the count last grew, in the unit of the rule.
    level           bigint           NOT NULL DEFAULT 0,
    first_event_id  bigint,
    -- How often the condition returned soon after its end, since began_at.
    returned        integer          NOT NULL DEFAULT 0,
    first_error     text,
    detail          text,
    -- Who has seen it: it is not repeated until it returns.
    acknowledged_by text,
    PRIMARY KEY (rule, subject),
    CONSTRAINT outbox_alert_counts_are_sane CHECK (count > 0 AND notified_count BETWEEN 0 AND count)
) WITH (fillfactor = 50);

COMMENT ON TABLE outbox_alert IS 'Open alerts, one row per rule and subject, so that many relays send each once.';
COMMENT ON COLUMN outbox_alert.notified_count IS 'The highest count that any channel has been told.';
COMMENT ON COLUMN outbox_alert.resolved_at IS 'When what the alert is about ended; NULL while it lasts. The row goes some time after that has been told.';
COMMENT ON COLUMN outbox_alert.detail IS 'What it is about, in words; the latest state.';

-- +goose StatementBegin
CREATE FUNCTION outbox_alert_changed() RETURNS trigger LANGUAGE plpgsql
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

CREATE TRIGGER outbox_alert_changed BEFORE UPDATE OF count, resolved_at ON outbox_alert
    FOR EACH ROW EXECUTE FUNCTION outbox_alert_changed();

CREATE TABLE outbox_alert_notice (
    rule          text COLLATE "C" NOT NULL,
    subject       text COLLATE "C" NOT NULL,
    channel       text             NOT NULL,
    -- When the channel was last sent that the condition lasts, and how bad it was; NULL again once its recovery was sent.
    sent_at       timestamptz,
    sent_level    bigint           NOT NULL DEFAULT 0,
    -- When the channel was first sent the present episode, and when its end.
    first_sent_at timestamptz,
    ended_sent_at timestamptz,
    -- The relay that sends holds the row until then; after a failure, when to try again.
    claimed_until timestamptz,
    PRIMARY KEY (rule, subject, channel),
    FOREIGN KEY (rule, subject) REFERENCES outbox_alert ON DELETE CASCADE
) WITH (fillfactor = 50);

COMMENT ON TABLE outbox_alert_notice IS 'What each channel has been told of each open alert.';

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

CREATE TABLE outbox_alert_past (
    id              bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rule            text COLLATE "C" NOT NULL,
    subject         text COLLATE "C" NOT NULL,
    began_at        timestamptz      NOT NULL,
    resolved_at     timestamptz      NOT NULL,
    returned        integer          NOT NULL,
    count           bigint           NOT NULL,
    first_event_id  bigint,
    first_error     text,
    detail          text,
    acknowledged_by text,
    notices         jsonb            NOT NULL
);

CREATE INDEX outbox_alert_past_resolved_at ON outbox_alert_past (resolved_at);

COMMENT ON TABLE outbox_alert_past IS 'Alerts that have ended within two weeks: notices says which channels were sent them, and when.';

CREATE TABLE outbox_watch (
    only_row      boolean     PRIMARY KEY DEFAULT true,
    watched_at    timestamptz NOT NULL DEFAULT '-infinity',
    sample        jsonb       NOT NULL DEFAULT '{}',
    -- Of the digests in outbox_relay_destination.
    salt          uuid        NOT NULL DEFAULT gen_random_uuid(),
    -- When the archive last ran to its end, and why it did not since.
    archived_at   timestamptz NOT NULL DEFAULT now(),
    archive_error text,
    CONSTRAINT outbox_watch_is_one_row CHECK (only_row)
) WITH (fillfactor = 50);

COMMENT ON TABLE outbox_watch IS 'What a relay saw when it last looked around the database, for the others.';

INSERT INTO outbox_watch DEFAULT VALUES;

-- Of all relays together. A minute is kept for a day, an hour for two weeks. An empty destination stands for all of them, "*" for those
-- beyond the busiest; an empty event type for all types. took and latency are histograms whose bounds are internal/relay/history's.
CREATE TABLE outbox_history (
    step        smallint             NOT NULL, -- minutes: 1 or 60
    destination text COLLATE "C"     NOT NULL,
    at          timestamptz          NOT NULL,
    event_type  text COLLATE "C"     NOT NULL,
    delivered   bigint               NOT NULL,
    failed      bigint               NOT NULL,
    retried     bigint               NOT NULL,
    probes      bigint               NOT NULL,
    backlog     bigint, -- the highest that was counted
    took        integer[]            NOT NULL,
    latency     integer[]            NOT NULL,
    PRIMARY KEY (step, destination, at, event_type)
) WITH (fillfactor = 50);

COMMENT ON TABLE outbox_history IS 'Attempts, times and backlog of each minute and hour, added up over relays.';

-- +goose Down
DROP TABLE outbox_history;
DROP TABLE outbox_watch;
DROP TABLE outbox_alert_past;
DROP TABLE outbox_alert_silence;
DROP TABLE outbox_alert_notice;
DROP TABLE outbox_alert;
DROP FUNCTION outbox_alert_changed();
