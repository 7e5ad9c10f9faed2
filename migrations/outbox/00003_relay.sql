-- What relays tell each other: who is alive, and which alert is open.

-- +goose Up
CREATE TABLE outbox_relay (
    -- The number under which a relay claims, and on which its session holds an advisory lock while it lives.
    instance     integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name         text        NOT NULL,
    version      text        NOT NULL,
    started_at   timestamptz NOT NULL DEFAULT now(),
    heartbeat_at timestamptz NOT NULL DEFAULT now(),
    -- Producers notify only while a live relay is idle: a NOTIFY in every transaction would serialise their commits.
    idle         boolean     NOT NULL DEFAULT false
) WITH (fillfactor = 50);

COMMENT ON TABLE outbox_relay IS 'Live relays. A row whose advisory lock is free belongs to a dead relay: its claims are given back.';

CREATE TABLE outbox_alert (
    rule           text COLLATE "C" NOT NULL,
    subject        text COLLATE "C" NOT NULL,
    opened_at      timestamptz      NOT NULL DEFAULT now(),
    last_at        timestamptz      NOT NULL DEFAULT now(),
    count          bigint           NOT NULL DEFAULT 1,
    first_event_id bigint,
    first_error    text,
    -- What the open window has told so far, and to which channels; a relay that sends holds the row until claimed_until.
    notified_count bigint           NOT NULL DEFAULT 0,
    notified_at    timestamptz,
    notified_to    text[]           NOT NULL DEFAULT '{}',
    claimed_until  timestamptz,
    PRIMARY KEY (rule, subject),
    CONSTRAINT outbox_alert_counts_are_sane CHECK (count > 0 AND notified_count BETWEEN 0 AND count)
) WITH (fillfactor = 50);

COMMENT ON TABLE outbox_alert IS 'Open alerts, one row per rule and subject, so that many relays send each once.';

-- +goose Down
DROP TABLE outbox_alert;
DROP TABLE outbox_relay;
