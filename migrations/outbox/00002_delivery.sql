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
    -- closed: deliveries flow. open: nothing is claimed until breaker_until. half_open: breaker_owner tries alone, until
    -- breaker_until.
    breaker           text COLLATE "C" NOT NULL DEFAULT 'closed',
    breaker_opened_at timestamptz,
    breaker_until     timestamptz,
    breaker_owner     integer,
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
    CONSTRAINT outbox_destination_breaker_owner_tries CHECK ((breaker = 'half_open') = (breaker_owner IS NOT NULL)),
    CONSTRAINT outbox_destination_breaker_failures_is_positive CHECK (breaker_failures >= 0)
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
    lease_expires_at timestamptz,
    last_attempt_at  timestamptz,
    delivered_at     timestamptz,
    not_after        timestamptz,
    claimed_by       integer,
    attempts         integer          NOT NULL DEFAULT 0,
    payload_bytes    integer          NOT NULL DEFAULT 0,
    rescues          smallint         NOT NULL DEFAULT 0,
    last_status      smallint,
    replay           boolean          NOT NULL DEFAULT false,
    destination      text COLLATE "C" NOT NULL,
    status           text COLLATE "C" NOT NULL DEFAULT 'pending',
    ordering_key     text COLLATE "C",
    last_reason      text,
    last_error       text,
    PRIMARY KEY (event_id, destination),
    -- One constraint, because PostgreSQL parses each anew for every statement.
    CONSTRAINT outbox_delivery_columns_are_sane CHECK (
        status IN ('pending', 'delivered', 'failed', 'discarded')
        AND (status = 'delivered') = (delivered_at IS NOT NULL)
        AND (claimed_by IS NULL) = (lease_expires_at IS NULL)
        AND (status = 'pending' OR claimed_by IS NULL)
        AND attempts >= 0 AND claim >= 0 AND rescues >= 0
        AND isfinite(next_attempt_at) AND coalesce(isfinite(not_after), true))
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
COMMENT ON COLUMN outbox_delivery.attempts IS 'POSTs made. Written by the settle: a stop, a rescue or a hold spends none.';
COMMENT ON COLUMN outbox_delivery.rescues IS 'Claims lost to a dead relay since the last settle and, from the sixth on, requests sent alone that were never settled; at a limit the delivery is failed as crash_loop.';
COMMENT ON COLUMN outbox_delivery.replay IS 'An operator made it pending again: it is sent after live events and backlog, and says so in a header.';
COMMENT ON COLUMN outbox_delivery.not_after IS 'When the last request may reach the receiver, as X-Outbox-Not-After has told it, or may have told it; afterwards only an operator sends it again. NULL: it was told nothing, or has accepted.';

-- The one hot index. No column that a claim writes stands in it.
CREATE INDEX outbox_delivery_due ON outbox_delivery (destination, replay, next_attempt_at, event_id) WHERE status = 'pending';
-- The earlier deliveries of one ordering key that block the later ones. Pending ones alone: a key with 100,000 failed deliveries
-- that its destination skips would be read from the oldest one at each claim.
CREATE INDEX outbox_delivery_order ON outbox_delivery (destination, ordering_key, event_id)
    WHERE ordering_key IS NOT NULL AND status = 'pending';
-- The failed heads of ordering keys.
CREATE INDEX outbox_delivery_blocked ON outbox_delivery (destination, ordering_key, event_id)
    WHERE ordering_key IS NOT NULL AND status = 'failed';
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

CREATE TABLE outbox_undelivered (
    only_row    boolean     PRIMARY KEY DEFAULT true,
    searched_at timestamptz NOT NULL DEFAULT '-infinity',
    -- Up to which id new events have been looked at; NULL: none yet. Up to which id this round through all of them has come.
    recent_id   bigint,
    round_id    bigint      NOT NULL DEFAULT 0,
    missing     bigint[]    NOT NULL DEFAULT '{}',
    CONSTRAINT outbox_undelivered_is_one_row CHECK (only_row)
) WITH (fillfactor = 50);
COMMENT ON TABLE outbox_undelivered IS 'How far relays have looked for events without deliveries, and the ids that they found, at most 1,001.';
INSERT INTO outbox_undelivered DEFAULT VALUES;

-- Until when relays want to be notified, in milliseconds since 1970. A sequence is one row that is written in place:
-- whatever blocks vacuum, it costs producers the same to read.
CREATE SEQUENCE outbox_armed MINVALUE 0 START 0;

-- In these functions only pg_catalog is searched for names: PostgreSQL takes the better match of two functions or operators
-- wherever on the path they are, and never looks for them in pg_temp. So the tables are qualified, with the schema that this
-- migration runs in. The DO block itself qualifies what it calls for the same reason. See docs/decisions/0038-least-privilege.md.
-- A producer needs no right beyond INSERT on outbox: what they do is done with their owner's rights.
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace(pg_catalog.replace($sql$

-- Refuses an event as a CHECK of outbox would. The name of each rule says it, because that name is all a producer sees.
CREATE FUNCTION {schema}.outbox_refuse(rule text) RETURNS integer LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'new row for relation "outbox" violates check constraint "%"', rule
        USING ERRCODE = 'check_violation', CONSTRAINT = rule, TABLE = 'outbox', SCHEMA = {name};
END
$$;

-- Routing and fan-out happen in the producer's transaction: an event and its deliveries commit together or not at all. An event
-- that breaks a rule is refused here. CHECKs would be parsed anew for every statement, some 8 us each; and with domains instead
-- of plain types a parameter that is used for two columns has "inconsistent types", and drivers do not know how to encode bytes
-- or a map for it. See docs/decisions/0058-cheap-inserts.md.
--
-- Text travels as HTTP headers, where only printable ASCII without surrounding blanks arrives unchanged. The length is
-- not a bound in the pattern: {1,255} takes PostgreSQL 25 us a value, this 0.5 us.
CREATE FUNCTION {schema}.outbox_fan_out() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    -- Not the transaction's start: an event that becomes due long before it commits would lie behind
    -- the position from which relays claim, and wait for their next sweep.
    inserted_at timestamptz := clock_timestamp();
BEGIN
    INSERT INTO {schema}.outbox_delivery (event_id, destination, next_attempt_at, ordering_key, payload_bytes)
    SELECT s.id, s.destination, s.due_at, s.ordering_key,
           CASE WHEN s.rule IS NOT NULL THEN {schema}.outbox_refuse(s.rule)
                WHEN s.bytes > 1048576 THEN {schema}.outbox_refuse('outbox_payload_is_at_most_1_mib')
                ELSE s.bytes END
    FROM (
        SELECT DISTINCT e.id, coalesce(r.destination, '') AS destination, greatest(e.available_at, inserted_at) AS due_at, e.ordering_key,
               octet_length(e.payload::text) AS bytes,
               CASE -- An event of the year 9998 would hold its ordering key until then. Hours, because a day has 23 to 25 of them.
                    WHEN e.available_at < '0001-01-01 00:00:00+00' OR e.available_at > now() + interval '8784 hours'
                        THEN 'outbox_available_at_is_in_year_1_to_366_days_ahead'
                    WHEN octet_length(e.event_type) NOT BETWEEN 1 AND 255 OR e.event_type ~ '[^\x21-\x7e]'
                        THEN 'outbox_event_type_is_1_to_255_printable_ascii_no_blanks'
                    WHEN e.event_version < 1 THEN 'outbox_event_version_is_positive'
                    WHEN e.headers <> '{}' AND NOT {schema}.outbox_headers_are_fit(e.headers)
                        THEN 'outbox_headers_have_unreserved_names_and_printable_values'
                    WHEN e.id < 1 THEN 'outbox_id_is_positive' -- commands take none below
                    WHEN octet_length(e.idempotency_key) NOT BETWEEN 1 AND 255 OR e.idempotency_key ~ '[^\x20-\x7e]|^ | $'
                        THEN 'outbox_idempotency_key_is_1_to_255_printable_ascii'
                    WHEN octet_length(e.ordering_key) NOT BETWEEN 1 AND 255 OR e.ordering_key ~ '[^\x20-\x7e]|^ | $'
                        THEN 'outbox_ordering_key_is_1_to_255_printable_ascii'
                    WHEN octet_length(e.related_reference) NOT BETWEEN 1 AND 255 OR e.related_reference ~ '[^\x20-\x7e]|^ | $'
                        THEN 'outbox_related_reference_is_1_to_255_printable_ascii'
               END AS rule
        FROM new_event e LEFT JOIN {schema}.outbox_route r ON e.event_type LIKE r.like_pattern
    ) s;

    -- FOUND: a duplicate that inserted nothing wakes no relay. A producer whose transactions are prepared (two-phase
    -- commit), where NOTIFY is not allowed, sets outbox.notify to off; relays then find its events by polling.
    IF FOUND AND coalesce(current_setting('outbox.notify', true), '') <> 'off'
       AND (SELECT last_value FROM {schema}.outbox_armed) > extract(epoch FROM inserted_at) * 1000
       -- A session that listens and never ends its transaction fills the queue, and then no COMMIT that notifies succeeds.
       AND pg_notification_queue_usage() < 0.5 THEN
        PERFORM pg_notify('outbox_wake', TG_TABLE_SCHEMA);
    END IF;
    RETURN NULL;
END
$$;

-- A route was added, by a relay or by hand: what was parked before is looked through from the start.
CREATE FUNCTION {schema}.outbox_route_added() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO {schema}.outbox_destination AS d (destination, parked_after)
    SELECT DISTINCT r.destination, 0::bigint FROM new_route r
    ON CONFLICT (destination) DO UPDATE SET parked_after = 0;
    RETURN NULL;
END
$$;

-- Gives the next batch of events behind an id the deliveries that the trigger would have made. An event that has any
-- delivery, also a parked or discarded one, is left alone. Call it again with last_id until it is finished.
CREATE FUNCTION {schema}.outbox_create_deliveries(after_id bigint DEFAULT 0, batch integer DEFAULT 10000,
    OUT last_id bigint, OUT finished boolean, OUT events integer, OUT deliveries integer)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
DECLARE
    looked_at   integer;
    missing     bigint[];
    inserted_at timestamptz := clock_timestamp();
BEGIN
    SELECT coalesce(max(e.id), after_id), count(*),
           array_agg(e.id) FILTER (WHERE NOT EXISTS (SELECT FROM {schema}.outbox_delivery d WHERE d.event_id = e.id))
    INTO last_id, looked_at, missing
    FROM (SELECT o.id FROM {schema}.outbox o WHERE o.id > after_id ORDER BY o.id LIMIT batch) e;
    finished := looked_at < batch;
    events := coalesce(cardinality(missing), 0);
    INSERT INTO {schema}.outbox_delivery (event_id, destination, next_attempt_at, ordering_key, payload_bytes)
    SELECT DISTINCT e.id, coalesce(r.destination, ''), greatest(e.available_at, inserted_at), e.ordering_key,
           octet_length(e.payload::text)
    FROM unnest(missing) m (id) CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox o WHERE o.id = m.id LIMIT 1) e
    LEFT JOIN {schema}.outbox_route r ON e.event_type LIKE r.like_pattern
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS deliveries = ROW_COUNT;
    -- They are behind later events of their ordering keys that are settled.
    INSERT INTO {schema}.outbox_destination AS t (destination, reordered)
    SELECT DISTINCT d.destination, 1::bigint FROM {schema}.outbox_delivery d
    WHERE d.event_id = ANY (missing) AND d.ordering_key IS NOT NULL AND d.destination <> '' ORDER BY 1
    ON CONFLICT (destination) DO UPDATE SET reordered = t.reordered + 1;
END
$$;

-- Gives the parked deliveries of a range of events to the destinations that they have by now, and returns how many those
-- deliveries were. A relay may neither insert nor delete a delivery. The range bounds what is read, whichever index leads to
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
        RETURNING p.event_id, parked.event_type, p.next_attempt_at, p.ordering_key, p.payload_bytes
    ), routed AS (
        INSERT INTO {schema}.outbox_delivery (event_id, destination, next_attempt_at, ordering_key, payload_bytes)
        SELECT DISTINCT g.event_id, r.destination, greatest(g.next_attempt_at, now()), g.ordering_key, g.payload_bytes
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
REVOKE ALL ON FUNCTION outbox_fan_out(), outbox_refuse(text), outbox_create_deliveries(bigint, integer), outbox_release_parked(bigint, bigint)
    FROM PUBLIC;

CREATE TRIGGER outbox_fan_out AFTER INSERT ON outbox
    REFERENCING NEW TABLE AS new_event FOR EACH STATEMENT EXECUTE FUNCTION outbox_fan_out();
CREATE TRIGGER outbox_route_added AFTER INSERT ON outbox_route
    REFERENCING NEW TABLE AS new_route FOR EACH STATEMENT EXECUTE FUNCTION outbox_route_added();

-- +goose Down
DROP TRIGGER outbox_fan_out ON outbox;
DROP FUNCTION outbox_release_parked(bigint, bigint);
DROP FUNCTION outbox_create_deliveries(bigint, integer);
DROP FUNCTION outbox_fan_out();
DROP FUNCTION outbox_refuse(text);
DROP SEQUENCE outbox_armed;
DROP TABLE outbox_undelivered;
DROP TABLE outbox_attempt;
DROP TABLE outbox_delivery;
DROP TABLE outbox_destination;
DROP TABLE outbox_route;
DROP FUNCTION outbox_route_added();
