-- The delivery: one event to one destination, the narrow row that carries all mutable state; and what decides
-- where events go and what became of them.

-- +goose Up
CREATE TABLE outbox_route (
    pattern      text COLLATE "C" NOT NULL,
    destination  text COLLATE "C" NOT NULL,
    -- The pattern as LIKE understands it: only '*' is special in a pattern.
    like_pattern text COLLATE "C" NOT NULL GENERATED ALWAYS AS (
        replace(replace(replace(replace(pattern, '\', '\\'), '%', '\%'), '_', '\_'), '*', '%')) STORED,
    PRIMARY KEY (pattern, destination),
    CONSTRAINT outbox_route_pattern_is_1_to_255_printable_ascii_no_blanks CHECK (pattern ~ '^[\x21-\x7e]{1,255}$'),
    CONSTRAINT outbox_route_destination_is_a_name CHECK (destination ~ '^[a-z0-9][a-z0-9_-]{0,62}$')
);

COMMENT ON TABLE outbox_route IS 'Which event types go to which destination; relays keep it equal to their configuration.';

CREATE TABLE outbox_destination (
    destination   text COLLATE "C" PRIMARY KEY,
    paused        boolean          NOT NULL DEFAULT false,
    paused_reason text,
    paused_at     timestamptz,
    CONSTRAINT outbox_destination_paused_has_time CHECK (paused = (paused_at IS NOT NULL))
);

COMMENT ON TABLE outbox_destination IS 'Runtime state of a destination that must outlive a relay process.';

CREATE TABLE outbox_delivery (
    event_id         bigint           NOT NULL,
    claim            bigint           NOT NULL DEFAULT 0,
    next_attempt_at  timestamptz      NOT NULL DEFAULT now(),
    lease_expires_at timestamptz,
    last_attempt_at  timestamptz,
    delivered_at     timestamptz,
    claimed_by       integer,
    attempts         integer          NOT NULL DEFAULT 0,
    payload_bytes    integer          NOT NULL DEFAULT 0,
    rescues          smallint         NOT NULL DEFAULT 0,
    last_status      smallint,
    destination      text COLLATE "C" NOT NULL,
    status           text COLLATE "C" NOT NULL DEFAULT 'pending',
    ordering_key     text COLLATE "C",
    last_reason      text,
    last_error       text,
    PRIMARY KEY (event_id, destination),
    CONSTRAINT outbox_delivery_status_is_known CHECK (status IN ('pending', 'delivered', 'failed', 'discarded')),
    CONSTRAINT outbox_delivery_delivered_has_time CHECK ((status = 'delivered') = (delivered_at IS NOT NULL)),
    CONSTRAINT outbox_delivery_lease_has_owner CHECK ((claimed_by IS NULL) = (lease_expires_at IS NULL)),
    CONSTRAINT outbox_delivery_only_pending_is_leased CHECK (status = 'pending' OR claimed_by IS NULL),
    CONSTRAINT outbox_delivery_counters_are_not_negative CHECK (attempts >= 0 AND claim >= 0 AND rescues >= 0),
    CONSTRAINT outbox_delivery_next_attempt_at_is_finite CHECK (isfinite(next_attempt_at))
) WITH (
    -- Half-full pages leave room for the claim to stay a heap-only update; the row is updated twice in its life.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_cost_delay = 1
);

COMMENT ON TABLE outbox_delivery IS 'One event to one destination. Destination '''' means parked: no route matched.';
COMMENT ON COLUMN outbox_delivery.claim IS 'The fence: grows with every claim; a settle with an older number changes nothing.';
COMMENT ON COLUMN outbox_delivery.attempts IS 'POSTs made. Written by the settle: a stop, a rescue or a hold spends none.';
COMMENT ON COLUMN outbox_delivery.rescues IS 'Claims lost to a dead relay since the last settle; at a limit the delivery is failed as crash_loop.';

-- The one hot index. No column that a claim writes stands in it.
CREATE INDEX outbox_delivery_due ON outbox_delivery (destination, next_attempt_at, event_id) WHERE status = 'pending';
-- The earlier deliveries of one ordering key that block the later ones.
CREATE INDEX outbox_delivery_order ON outbox_delivery (destination, ordering_key, event_id)
    WHERE ordering_key IS NOT NULL AND status IN ('pending', 'failed');
CREATE INDEX outbox_delivery_failed ON outbox_delivery (destination, event_id) WHERE status = 'failed';

CREATE TABLE outbox_attempt (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_id    bigint           NOT NULL,
    claim       bigint           NOT NULL,
    started_at  timestamptz      NOT NULL,
    duration_ms integer          NOT NULL,
    attempt     integer          NOT NULL,
    relay       integer          NOT NULL,
    status      smallint,
    destination text COLLATE "C" NOT NULL,
    outcome     text COLLATE "C" NOT NULL,
    reason      text COLLATE "C" NOT NULL,
    error       text
);

COMMENT ON TABLE outbox_attempt IS 'The log of attempts that did not deliver (of all attempts, when configured so).';

-- One claim makes at most one attempt.
CREATE UNIQUE INDEX outbox_attempt_claim ON outbox_attempt (event_id, destination, claim);

-- +goose Down
DROP TABLE outbox_attempt;
DROP TABLE outbox_delivery;
DROP TABLE outbox_destination;
DROP TABLE outbox_route;
