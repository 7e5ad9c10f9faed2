-- Alerts that are told once when they fire and once when they are resolved, and what relays watch for them.

-- +goose Up
-- Whoever sees a condition inserts (rule, subject) ON CONFLICT DO UPDATE SET count = count + 1; whoever sees its end sets
-- resolved_at. The trigger below does the rest.
ALTER TABLE outbox_alert
    ADD COLUMN resolved_at    timestamptz,
    ADD COLUMN detail         text,
    -- How bad it was when the count last grew, in the unit of the rule; see relay/watch.go.
    ADD COLUMN level          bigint NOT NULL DEFAULT 0,
    -- What the count was when the present episode began.
    ADD COLUMN counted_before bigint NOT NULL DEFAULT 0,
    -- When the first channel was told of the recovery: what fires after that begins a new episode.
    ADD COLUMN recovered_at   timestamptz,
    -- When somebody should look at this row again; NULL: not before something happens to it.
    ADD COLUMN due_at         timestamptz DEFAULT now();
COMMENT ON COLUMN outbox_alert.resolved_at IS 'When what the alert is about ended; NULL while it lasts. The row goes some time after that has been told.';
COMMENT ON COLUMN outbox_alert.detail IS 'What it is about, in words; the latest state.';
COMMENT ON COLUMN outbox_alert.notified_count IS 'The highest count that anybody has been told.';
-- A relay of the version before, still running while this migration is applied, needs the columns to be there.
COMMENT ON COLUMN outbox_alert.notified_at IS 'Not used since version 8: see outbox_alert_notice.';
COMMENT ON COLUMN outbox_alert.notified_to IS 'Not used since version 8: see outbox_alert_notice.';
COMMENT ON COLUMN outbox_alert.claimed_until IS 'Not used since version 8: see outbox_alert_notice.';

-- +goose StatementBegin
CREATE FUNCTION outbox_alert_changed() RETURNS trigger LANGUAGE plpgsql AS $$
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

CREATE TRIGGER outbox_alert_changed BEFORE UPDATE OF count, resolved_at ON outbox_alert
    FOR EACH ROW EXECUTE FUNCTION outbox_alert_changed();

CREATE TABLE outbox_alert_notice (
    rule            text COLLATE "C" NOT NULL,
    subject         text COLLATE "C" NOT NULL,
    channel         text             NOT NULL,
    -- The alert's count as this channel was told it last, and as it was when the channel was told of the recovery.
    count           bigint           NOT NULL DEFAULT 0,
    recovered_count bigint           NOT NULL DEFAULT 0,
    notified_at     timestamptz,
    -- The relay that sends holds the row until then; after a failure, when to try again.
    claimed_until   timestamptz,
    PRIMARY KEY (rule, subject, channel),
    FOREIGN KEY (rule, subject) REFERENCES outbox_alert ON DELETE CASCADE
) WITH (fillfactor = 50);

COMMENT ON TABLE outbox_alert_notice IS 'What each channel has been told of each open alert.';

CREATE TABLE outbox_rescue (
    at         timestamptz NOT NULL DEFAULT now(),
    instance   integer     NOT NULL,
    deliveries integer     NOT NULL
);

COMMENT ON TABLE outbox_rescue IS 'Relays that were found dead in the last day, and how many deliveries were given back.';

CREATE TABLE outbox_watch (
    only_row   boolean     PRIMARY KEY DEFAULT true,
    watched_at timestamptz NOT NULL DEFAULT '-infinity',
    sample     jsonb       NOT NULL DEFAULT '{}',
    CONSTRAINT outbox_watch_is_one_row CHECK (only_row)
) WITH (fillfactor = 50);

COMMENT ON TABLE outbox_watch IS 'What a relay saw when it last looked around the database, for the others.';

INSERT INTO outbox_watch DEFAULT VALUES;

-- The failed heads of ordering keys, so that counting them does not read what waits behind them. It holds only what failed.
CREATE INDEX outbox_delivery_blocked ON outbox_delivery (destination, ordering_key, event_id)
    WHERE ordering_key IS NOT NULL AND status = 'failed';

-- +goose Down
DROP INDEX outbox_delivery_blocked;
DROP TABLE outbox_watch;
DROP TABLE outbox_rescue;
DROP TABLE outbox_alert_notice;
DROP TRIGGER outbox_alert_changed ON outbox_alert;
DROP FUNCTION outbox_alert_changed();
ALTER TABLE outbox_alert
    DROP COLUMN resolved_at, DROP COLUMN detail, DROP COLUMN level, DROP COLUMN counted_before, DROP COLUMN recovered_at,
    DROP COLUMN due_at;
COMMENT ON COLUMN outbox_alert.notified_count IS NULL;
COMMENT ON COLUMN outbox_alert.notified_at IS NULL;
COMMENT ON COLUMN outbox_alert.notified_to IS NULL;
COMMENT ON COLUMN outbox_alert.claimed_until IS NULL;
