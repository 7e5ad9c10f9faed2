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

COMMENT ON TABLE outbox_route IS 'Which event types go to which destination: the routes of all registered relays together. Relays keep it so.';

CREATE TABLE outbox_destination (
    destination       text COLLATE "C" PRIMARY KEY,
    paused            boolean          NOT NULL DEFAULT false,
    paused_reason     text,
    paused_at         timestamptz,
    -- closed: deliveries flow. open: nothing is claimed until breaker_until. half_open: breaker_relay_id tries alone, until
    -- breaker_until.
    breaker           text COLLATE "C" NOT NULL DEFAULT 'closed',
    breaker_opened_at timestamptz,
    breaker_until     timestamptz,
    breaker_relay_id  integer,
    breaker_probes    integer          NOT NULL DEFAULT 0,
    breaker_error     text,
    -- The evidence against a destination is shared by all relays and outlives each: at a quiet destination one relay alone,
    -- or one that is restarted between two attempts, never sees enough of it.
    breaker_failures  integer          NOT NULL DEFAULT 0,
    breaker_events    bigint[]         NOT NULL DEFAULT '{}',
    reordered         bigint           NOT NULL DEFAULT 0,
    parked_after      bigint,
    CONSTRAINT outbox_destination_paused_has_time CHECK (paused = (paused_at IS NOT NULL)),
    CONSTRAINT outbox_destination_breaker_is_known CHECK (breaker IN ('closed', 'open', 'half_open')),
    CONSTRAINT outbox_destination_breaker_has_times
        CHECK ((breaker = 'closed') = (breaker_opened_at IS NULL) AND (breaker = 'closed') = (breaker_until IS NULL)),
    CONSTRAINT outbox_destination_half_open_has_a_relay CHECK ((breaker = 'half_open') = (breaker_relay_id IS NOT NULL)),
    CONSTRAINT outbox_destination_breaker_failures_is_not_negative CHECK (breaker_failures >= 0)
);

COMMENT ON TABLE outbox_destination IS 'Runtime state of a destination that must outlive a relay process.';
COMMENT ON COLUMN outbox_destination.breaker_failures IS
    'While the breaker is closed: failures of all relays against the destination, of which each answer takes back some. Only failures write it, and answers that follow them.';
COMMENT ON COLUMN outbox_destination.breaker_events IS
    'The first events that were answered with a failure; also while the breaker is open.';
COMMENT ON COLUMN outbox_destination.reordered IS 'Grows whenever deliveries of earlier events become pending again: by a replay, or because they were parked. Relays then forget up to which event an ordering key is settled.';
COMMENT ON COLUMN outbox_destination.parked_after IS 'A route to the destination was added: parked deliveries up to this event have been looked through for it, those behind it not yet. NULL: all have.';

CREATE TABLE outbox_delivery (
    event_id         bigint           NOT NULL,
    claim            bigint           NOT NULL DEFAULT 0,
    next_attempt_at  timestamptz      NOT NULL DEFAULT now(),
    joined           bigint           DEFAULT 0,
    blocked_by       bigint,
    lease_expires_at timestamptz,
    last_attempt_at  timestamptz,
    delivered_at     timestamptz,
    not_after        timestamptz,
    claimed_by       integer,
    attempts         integer          NOT NULL DEFAULT 0,
    payload_bytes    integer          NOT NULL DEFAULT 0,
    rescues          smallint         NOT NULL DEFAULT 0,
    last_http_status smallint,
    replay           boolean          NOT NULL DEFAULT false,
    destination      text COLLATE "C" NOT NULL,
    status           text COLLATE "C" NOT NULL DEFAULT 'pending',
    ordering_key     text COLLATE "C",
    last_reason      text,
    last_error       text,
    PRIMARY KEY (event_id, destination)
) WITH (
    -- Half-full pages leave room for every row of a page to be claimed at once and stay a heap-only update: a claimed row is
    -- longer than it was, and while a long transaction blocks vacuum, no room is won by pruning.
    fillfactor = 44,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_cost_delay = 1
);

-- ANALYZE while few distinct keys are pending would make the primary key look like the way to the head of a key.
ALTER TABLE outbox_delivery ALTER COLUMN ordering_key SET (n_distinct = -0.9);

COMMENT ON TABLE outbox_delivery IS 'One event to one destination. Destination '''' means parked: no route matched.';
COMMENT ON COLUMN outbox_delivery.claim IS 'The fence: grows with every claim; a settle with an older number changes nothing.';
COMMENT ON COLUMN outbox_delivery.claimed_by IS 'The relay (outbox_relay.id) that has it in flight, or died with it: lease_expires_at and outbox_void say whether the claim holds.';
COMMENT ON COLUMN outbox_delivery.attempts IS 'POSTs made. Written by the settle: a stop, a rescue or a hold spends none.';
COMMENT ON COLUMN outbox_delivery.rescues IS 'Up to six: claims since the last settle whose relay died, or let the lease end. Beyond: requests since then that were sent alone and never settled. At a limit the delivery fails as crash_loop.';
COMMENT ON COLUMN outbox_delivery.replay IS 'An operator made it pending again: it is sent after live events and backlog, and says so in a header.';
COMMENT ON COLUMN outbox_delivery.not_after IS 'When the last request may reach the receiver, as X-Outbox-Not-After has told it, or may have told it; afterwards only an operator sends it again. NULL: it was told nothing, or has accepted.';
COMMENT ON COLUMN outbox_delivery.joined IS
    'The place in the order of the ordering key, before event_id. 0: the event was due when a relay took it. NULL: it is due later and has not joined its key, so that it holds no other event. Otherwise the number of the range it joined behind, times 2^22, and a counter.';
COMMENT ON COLUMN outbox_delivery.blocked_by IS
    'The event of its ordering key behind which a pending delivery waits. Claims do not see it until that event is delivered or discarded. NULL: it waits for nothing but its time.';

-- The one hot index. No column that a claim writes stands in it, except for a delivery that was blocked.
CREATE INDEX outbox_delivery_due ON outbox_delivery (destination, replay, next_attempt_at, event_id)
    WHERE status = 'pending' AND blocked_by IS NULL;
-- What waits behind a head, and which heads there are.
CREATE INDEX outbox_delivery_waiting ON outbox_delivery (destination, blocked_by, event_id)
    WHERE status = 'pending' AND blocked_by IS NOT NULL;
-- The earlier deliveries of one ordering key that block the later ones. Pending ones alone: a key with 100,000 failed deliveries
-- that its destination skips would be read from the oldest one at each claim.
CREATE INDEX outbox_delivery_order ON outbox_delivery (destination, ordering_key, joined, event_id)
    WHERE status = 'pending' AND ordering_key IS NOT NULL AND joined IS NOT NULL;
-- What has not joined its key yet. No claim reads it in front of what is due.
CREATE INDEX outbox_delivery_scheduled ON outbox_delivery (destination, ordering_key, next_attempt_at, event_id)
    WHERE status = 'pending' AND ordering_key IS NOT NULL AND joined IS NULL;
-- The failed heads of ordering keys.
CREATE INDEX outbox_delivery_heads ON outbox_delivery (destination, ordering_key, joined, event_id)
    WHERE status = 'failed' AND ordering_key IS NOT NULL;
-- What waits for an operator or for a route, by the order of its events.
CREATE INDEX outbox_delivery_aside ON outbox_delivery (destination, event_id)
    WHERE status = 'failed' OR status = 'pending' AND destination = '';

CREATE TABLE outbox_attempt (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_id    bigint           NOT NULL,
    claim       bigint           NOT NULL,
    started_at  timestamptz      NOT NULL,
    duration_ms integer          NOT NULL,
    attempt     integer          NOT NULL,
    relay_id    integer          NOT NULL,
    http_status smallint,
    destination text COLLATE "C" NOT NULL,
    outcome     text COLLATE "C" NOT NULL,
    reason      text COLLATE "C" NOT NULL,
    error       text
);

COMMENT ON TABLE outbox_attempt IS 'The log of attempts that did not deliver (of all attempts, when configured so).';

-- One claim makes at most one attempt.
CREATE UNIQUE INDEX outbox_attempt_claim ON outbox_attempt (event_id, destination, claim);

-- Names are found as in outbox_wake (00001_event.sql).
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace(pg_catalog.replace($sql$

-- Refuses a delivery as a CHECK would.
CREATE FUNCTION {schema}.outbox_refuse_delivery() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'new row for relation "outbox_delivery" violates check constraint "%"', TG_NAME
        USING ERRCODE = 'check_violation', CONSTRAINT = TG_NAME, TABLE = 'outbox_delivery', SCHEMA = {name},
              DETAIL = format('The delivery is that of event %s to %s.', NEW.event_id, NEW.destination);
END
$$;

-- A route was added, by a relay or by hand: what was parked before is looked through from the start.
CREATE FUNCTION {schema}.outbox_route_added() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO {schema}.outbox_destination AS d (destination, parked_after)
    SELECT DISTINCT r.destination, 0::bigint FROM new_route r ORDER BY 1 -- as others lock them
    ON CONFLICT (destination) DO UPDATE SET parked_after = 0;
    RETURN NULL;
END
$$;

-- Gives the parked deliveries of a range of events to the destinations that they have by now, and returns how many those
-- deliveries were. A relay may not delete a delivery. The range bounds what is read, whichever index leads to
-- it. LIMIT keeps the lookup of each event from becoming a scan of all events.
CREATE FUNCTION {schema}.outbox_release_parked(after_id bigint, last_id bigint)
RETURNS bigint LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
    WITH parked AS MATERIALIZED (
        SELECT p.event_id, e.event_type FROM {schema}.outbox_delivery p
        CROSS JOIN LATERAL (SELECT event_type FROM {schema}.outbox WHERE id = p.event_id LIMIT 1) e
        WHERE p.destination = '' AND p.status = 'pending' AND p.event_id > after_id AND p.event_id <= last_id
          AND EXISTS (SELECT FROM {schema}.outbox_route r WHERE e.event_type LIKE r.like_pattern)
        FOR UPDATE OF p
    ), gone AS (
        DELETE FROM {schema}.outbox_delivery p USING parked
        WHERE p.event_id = parked.event_id AND p.destination = ''
        RETURNING p.event_id, parked.event_type, p.joined, p.next_attempt_at, p.ordering_key, p.payload_bytes
    ), routed AS (
        INSERT INTO {schema}.outbox_delivery (event_id, destination, joined, next_attempt_at, ordering_key, payload_bytes)
        SELECT DISTINCT g.event_id, r.destination, g.joined, greatest(g.next_attempt_at, now()), g.ordering_key, g.payload_bytes
        FROM gone g JOIN {schema}.outbox_route r ON g.event_type LIKE r.like_pattern
        ON CONFLICT DO NOTHING
        RETURNING destination, ordering_key
    ), reordered AS (
        INSERT INTO {schema}.outbox_destination AS d (destination, reordered)
        SELECT DISTINCT destination, 1::bigint FROM routed WHERE ordering_key IS NOT NULL ORDER BY destination
        ON CONFLICT (destination) DO UPDATE SET reordered = d.reordered + 1
    )
    SELECT count(*) FROM gone
$$;

    $sql$, '{schema}', pg_catalog.quote_ident(pg_catalog.current_schema())),
    '{name}', pg_catalog.quote_literal(pg_catalog.current_schema()));
END
$do$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION outbox_refuse_delivery(), outbox_release_parked(bigint, bigint) FROM PUBLIC;

-- Instead of a CHECK, which PostgreSQL parses again for every statement: 20 us an insert. It reads the condition of a trigger again for
-- each statement that meets it: claims do not. See docs/decisions/0058-cheap-inserts.md for what is not refused.
CREATE TRIGGER outbox_delivery_columns_are_sane AFTER UPDATE OF status, delivered_at, attempts, next_attempt_at ON outbox_delivery
FOR EACH ROW WHEN (NOT (
    NEW.status IN ('pending', 'delivered', 'failed', 'discarded')
    AND (NEW.status = 'delivered') = (NEW.delivered_at IS NOT NULL)
    AND (NEW.status = 'pending' OR NEW.claimed_by IS NULL)
    AND NEW.attempts >= 0
    AND isfinite(NEW.next_attempt_at)
)) EXECUTE FUNCTION outbox_refuse_delivery();
CREATE TRIGGER outbox_route_added AFTER INSERT ON outbox_route
    REFERENCING NEW TABLE AS new_route FOR EACH STATEMENT EXECUTE FUNCTION outbox_route_added();

-- +goose Down
DROP FUNCTION outbox_release_parked(bigint, bigint);
DROP TABLE outbox_attempt;
DROP TABLE outbox_delivery;
DROP TABLE outbox_destination;
DROP TABLE outbox_route;
DROP FUNCTION outbox_route_added();
DROP FUNCTION outbox_refuse_delivery();
