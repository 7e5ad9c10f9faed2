-- What relays did, for charts that outlive them; and the alerts that have ended, with who was sent them.

-- +goose Up
-- Of all relays together. A minute is kept for a day, an hour for two weeks. An empty destination stands for all of them, "*" for those
-- beyond the busiest; an empty event type for all types. took and latency are histograms whose bounds are relay/history's.
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

ALTER TABLE outbox_alert_notice ADD COLUMN first_sent_at timestamptz, ADD COLUMN ended_sent_at timestamptz;

CREATE TABLE outbox_alert_past (
    id             bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rule           text COLLATE "C" NOT NULL,
    subject        text COLLATE "C" NOT NULL,
    began_at       timestamptz      NOT NULL,
    resolved_at    timestamptz      NOT NULL,
    returned       integer          NOT NULL,
    count          bigint           NOT NULL,
    first_event_id bigint,
    first_error    text,
    detail         text,
    acknowledged_by text,
    notices        jsonb            NOT NULL
);

CREATE INDEX outbox_alert_past_resolved_at ON outbox_alert_past (resolved_at);

COMMENT ON TABLE outbox_alert_past IS 'Alerts that have ended within two weeks: notices says which channels were sent them, and when.';

-- +goose Down
DROP TABLE outbox_alert_past;
ALTER TABLE outbox_alert_notice DROP COLUMN first_sent_at, DROP COLUMN ended_sent_at;
DROP TABLE outbox_history;
