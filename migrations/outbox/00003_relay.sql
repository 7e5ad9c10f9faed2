-- Relays: who is alive and for what, which events they have taken, and which database this is.

-- +goose Up
CREATE TABLE outbox_relay (
    -- The number under which a relay claims.
    id                integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name              text        NOT NULL,
    version           text        NOT NULL,
    started_at        timestamptz NOT NULL DEFAULT now(),
    heartbeat_at      timestamptz NOT NULL DEFAULT now(),
    lease             interval    NOT NULL DEFAULT '60 seconds',
    session_pid       integer,
    server_started_at timestamptz NOT NULL DEFAULT pg_postmaster_start_time(),
    asleep            boolean     NOT NULL DEFAULT false,
    quarantined       text,
    environment       text,
    address           text,
    -- What the relay refused when it was to read its configuration again; NULL: it uses what is configured.
    reload_error      text,
    reload_failed_at  timestamptz
) WITH (fillfactor = 50);

-- A session and not an advisory lock shows that the relay lives: any login of the database could hold, or queue for, the lock.
COMMENT ON TABLE outbox_relay IS 'Live relays. A row belongs to a dead relay when its session is gone, when its heartbeat is older than 15 seconds or, without a session, older than its lease. Its claims end with the row.';
COMMENT ON COLUMN outbox_relay.lease IS 'For how long the claims of the relay hold. Without a session, also after how long without a heartbeat it is dead.';
COMMENT ON COLUMN outbox_relay.session_pid IS 'The backend of the relay''s session, whose application_name is ''outbox-relay session '' and the id. Null, behind a pooler: only an old heartbeat says that the relay is dead.';
COMMENT ON COLUMN outbox_relay.server_started_at IS 'When the server of the session started. A copy of this row on another server has no session there.';
COMMENT ON COLUMN outbox_relay.quarantined IS 'Why the relay does nothing here. Null: it works. Set together with its environment and address, which accepting records.';
COMMENT ON COLUMN outbox_relay.asleep IS 'Nothing of the relay runs: a connection that outboxes share writes its heartbeat twice a minute and listens for it.';

CREATE TABLE outbox_relay_destination (
    relay_id      integer          NOT NULL REFERENCES outbox_relay ON DELETE CASCADE,
    destination   text COLLATE "C" NOT NULL,
    -- A salted digest of the settings, and one of the secrets, that the relay has for the destination. They are too short to tell a
    -- secret by.
    settings      text             NOT NULL DEFAULT '',
    secrets       text             NOT NULL DEFAULT '',
    -- Since when the destination refuses this relay, and what it answers; NULL: it does not, or all relays hold the destination.
    refused_at    timestamptz,
    refused_error text,
    -- Until when it asked the relay to wait (Retry-After), and to how many requests a second its 429s have slowed the relay; NULL: it has
    -- not. '-infinity': an operator has ended the wait.
    wait_until    timestamptz,
    slowed_to     float8,
    PRIMARY KEY (destination, relay_id)
);

COMMENT ON TABLE outbox_relay_destination IS 'Which destinations each registered relay delivers to. Pending deliveries of any other destination are unserved.';

-- What each relay is configured for, so that no relay's start or stop removes routes that another live relay has.
CREATE TABLE outbox_relay_route (
    relay_id    integer          NOT NULL REFERENCES outbox_relay ON DELETE CASCADE,
    pattern     text COLLATE "C" NOT NULL,
    destination text COLLATE "C" NOT NULL,
    PRIMARY KEY (pattern, destination, relay_id)
);

-- To remove a relay's routes with its row.
CREATE INDEX outbox_relay_route_relay ON outbox_relay_route (relay_id);

COMMENT ON TABLE outbox_relay_route IS 'The routes that each registered relay was configured with; one that stops withdraws its own first. outbox_route is the union of them, or what it was while there are none.';

CREATE TABLE outbox_rescue (
    at       timestamptz NOT NULL DEFAULT now(),
    relay_id integer     NOT NULL
);
-- Without a key, and with this, rows can be deleted while all tables of the database are published.
ALTER TABLE outbox_rescue REPLICA IDENTITY FULL;

COMMENT ON TABLE outbox_rescue IS 'Relays that were found dead in the last day.';

-- Claims that ended before their lease. A rescue writes one row here instead of changing every delivery: it would have to
-- search all that is pending for them, because no index may hold claimed_by (the claim would not stay heap-only).
CREATE TABLE outbox_void (
    relay_id integer     NOT NULL,
    -- Which claims of the relay: those whose lease ends in this range. Afterwards the lease says the same.
    after    timestamptz NOT NULL,
    until    timestamptz NOT NULL,
    -- Whether the relay died with them. Only then may a delivery have killed it.
    died     boolean     NOT NULL,
    PRIMARY KEY (relay_id, until)
);

COMMENT ON TABLE outbox_void IS 'Claims that no longer hold although their lease lasts: of relays that died or left, or claims whose acknowledgement was lost.';

-- The last row is how far all relays have come. It is inserted, never updated, so that reading it costs the same while
-- vacuum is blocked. Its primary key is the lock of the takers. See docs/decisions/0069-intake-by-snapshot-difference.md.
CREATE TABLE outbox_range (
    seq             bigint      PRIMARY KEY,
    relay_id        integer     NOT NULL,
    fence           bigint      NOT NULL,
    base            pg_snapshot NOT NULL,
    target          pg_snapshot NOT NULL,
    low             bigint      NOT NULL,
    upto            bigint      NOT NULL,
    new_above       bigint,
    more            boolean     NOT NULL,
    oldest_open_seq bigint      NOT NULL,
    keys            integer[],
    promised        interval    NOT NULL DEFAULT '0',
    taken_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at        timestamptz,
    beyond          boolean     NOT NULL DEFAULT false
) WITH (fillfactor = 50);

-- No transaction is visible in this snapshot: all events are new, also those that are inserted before this file is applied.
INSERT INTO outbox_range (seq, relay_id, fence, base, target, low, upto, more, oldest_open_seq, ended_at)
VALUES (1, 0, 0, '3:3:', '3:3:', 0, 0, false, 1, now());

COMMENT ON TABLE outbox_range IS 'Events that a relay has taken together: those visible in target and not in base, with ids above low and up to upto. The last row is how far all relays have come.';
COMMENT ON COLUMN outbox_range.fence IS 'Grows with the clock at each take and rescue. A settle with another number writes nothing.';
COMMENT ON COLUMN outbox_range.new_above IS 'NULL: the range is a whole difference. Otherwise it was cut by id, and the events of transactions from xmax(base) on have ids above this one.';
COMMENT ON COLUMN outbox_range.more IS 'The difference of base and target has events above upto. The next range continues it.';
COMMENT ON COLUMN outbox_range.oldest_open_seq IS 'The seq of the oldest range that was open when this one was taken; its own if none was.';
COMMENT ON COLUMN outbox_range.keys IS 'Hashes of the ordering keys of its events. NULL: none has a key.';
COMMENT ON COLUMN outbox_range.promised IS 'The shortest X-Outbox-Not-After that its relay may have told a receiver, counted from taken_at.';
COMMENT ON COLUMN outbox_range.ended_at IS 'When each of its deliveries had a row. NULL: the range is open.';
COMMENT ON COLUMN outbox_range.beyond IS 'Events that are not visible in target may have rows already. A take leaves these out.';

-- Only the server that gave out the transaction ids can compare them.
CREATE TABLE outbox_intake (
    only_row          boolean     PRIMARY KEY DEFAULT true,
    system_identifier bigint      NOT NULL DEFAULT 0,
    timeline          integer     NOT NULL DEFAULT 0,
    recorded_at       timestamptz NOT NULL DEFAULT now(),
    -- A take returns both numbers as its snapshot sees them, so that a relay knows whether what it remembers still holds.
    routes            bigint      NOT NULL DEFAULT 0,
    destinations      bigint      NOT NULL DEFAULT 0,
    CONSTRAINT outbox_intake_is_one_row CHECK (only_row)
);
-- Some servers let only superusers read the control file.
INSERT INTO outbox_intake (system_identifier, timeline) SELECT
    CASE WHEN has_function_privilege('pg_control_system()', 'EXECUTE') THEN (SELECT system_identifier FROM pg_control_system()) ELSE 0 END,
    CASE WHEN has_function_privilege('pg_control_checkpoint()', 'EXECUTE') THEN (SELECT timeline_id FROM pg_control_checkpoint()) ELSE 0 END;

COMMENT ON TABLE outbox_intake IS 'The server whose transaction ids outbox and outbox_range have. 0: it did not tell its identifier or timeline.';
COMMENT ON COLUMN outbox_intake.routes IS 'Grows with each change of outbox_route.';
COMMENT ON COLUMN outbox_intake.destinations IS 'Grows whenever a destination is paused or resumed, or its breaker changes.';

-- Which database this is, so that a relay which wakes up on a copy of it sends nothing.
CREATE TABLE outbox_identity (
    only_row          boolean          PRIMARY KEY DEFAULT true,
    -- What PostgreSQL itself says. A dump that is restored has another oid or system; a copied data directory has neither.
    -- 0: the server does not tell.
    system_identifier bigint           NOT NULL,
    database_oid      bigint           NOT NULL,
    timeline          integer          NOT NULL,
    -- What relays are configured with. Empty: none of them names its environment.
    environment       text COLLATE "C" NOT NULL,
    addresses         text[]           NOT NULL,
    recorded_at       timestamptz      NOT NULL DEFAULT now(),
    CONSTRAINT outbox_identity_is_one_row CHECK (only_row),
    CONSTRAINT outbox_identity_environment_is_at_most_63_printable_ascii
        CHECK (octet_length(environment) <= 63 AND environment !~ '[^\x20-\x7e]')
);

COMMENT ON TABLE outbox_identity IS 'The database that relays last accepted as theirs. On any other they quarantine.';

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

-- Names are found as in outbox_wake (00001_event.sql). The settings travel with each function: neither a caller's nor statistics from when the tables
-- were empty may change what it does.
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace(pg_catalog.replace($sql$

-- Relays remember routes and the states of destinations until the numbers in outbox_intake have grown.
CREATE FUNCTION {schema}.outbox_count_change() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF TG_TABLE_NAME = 'outbox_route' THEN
        UPDATE {schema}.outbox_intake SET routes = routes + 1;
    ELSE
        UPDATE {schema}.outbox_intake SET destinations = destinations + 1;
    END IF;
    RETURN NULL;
END
$$;

-- Reports whether an event's deliveries have all been made: its range, and all before it, have ended. Otherwise a relay has yet to
-- take the event, or has it in hand.
CREATE FUNCTION {schema}.outbox_is_routed(event_id bigint) RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    SELECT pg_visible_in_snapshot(
        (SELECT o.xid FROM {schema}.outbox o WHERE o.id = event_id LIMIT 1),
        (SELECT coalesce((SELECT o.base FROM {schema}.outbox_range o WHERE o.seq >= l.oldest_open_seq AND o.ended_at IS NULL ORDER BY o.seq LIMIT 1),
                         CASE WHEN l.more THEN l.base ELSE l.target END)
         FROM (SELECT * FROM {schema}.outbox_range ORDER BY seq DESC LIMIT 1) l))
$$;

-- Makes pending deliveries of the next events, in the order of their ids, on another server: of those without any, and of those
-- that were in hand or not yet taken. It marks those that are not visible in since, so that no relay takes them again: their
-- transaction ids may come from another server. An ordering key that breaks the rules, and that no index may be able to hold, is
-- left out.
CREATE FUNCTION {schema}.outbox_cover_events(after_id bigint, batch integer, since pg_snapshot,
    OUT last_id bigint, OUT finished boolean, OUT deliveries bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
DECLARE
    -- All events that are visible in it are settled.
    settled     pg_snapshot;
    inserted_at timestamptz := clock_timestamp();
BEGIN
    SELECT coalesce((SELECT o.base FROM {schema}.outbox_range o WHERE o.seq >= l.oldest_open_seq AND o.ended_at IS NULL ORDER BY o.seq LIMIT 1),
                    CASE WHEN l.more THEN l.base ELSE l.target END)
    INTO settled FROM (SELECT * FROM {schema}.outbox_range ORDER BY seq DESC LIMIT 1) l;
    SELECT coalesce(max(e.id), after_id), count(*) < batch INTO last_id, finished
    FROM (SELECT o.id FROM {schema}.outbox o WHERE o.id > after_id ORDER BY o.id LIMIT batch) e;
    WITH covered AS (
        INSERT INTO {schema}.outbox_delivery (event_id, destination, joined, next_attempt_at, ordering_key, payload_bytes)
        SELECT DISTINCT ON (e.id, r.destination) e.id, coalesce(r.destination, ''), CASE WHEN k.key IS NULL OR e.available_at <= inserted_at THEN 0 END,
               greatest(e.available_at, inserted_at), k.key, octet_length(e.payload::text)
        FROM {schema}.outbox e CROSS JOIN LATERAL (SELECT CASE WHEN octet_length(e.ordering_key) <= 255 THEN e.ordering_key END AS key) k
        LEFT JOIN {schema}.outbox_route r ON e.event_type LIKE r.like_pattern
        WHERE e.id > after_id AND e.id <= last_id
          AND (NOT EXISTS (SELECT FROM {schema}.outbox_delivery d WHERE d.event_id = e.id)
               OR r.destination IS NOT NULL AND NOT pg_visible_in_snapshot(e.xid, settled))
        ON CONFLICT DO NOTHING
        RETURNING destination, ordering_key
    ), reordered AS (
        INSERT INTO {schema}.outbox_destination AS t (destination, reordered)
        SELECT DISTINCT c.destination, 1::bigint FROM covered c WHERE c.ordering_key IS NOT NULL AND c.destination <> '' ORDER BY 1
        ON CONFLICT (destination) DO UPDATE SET reordered = t.reordered + 1
    )
    SELECT count(*) INTO deliveries FROM covered;
    -- What was committed since the statement before has no delivery, and a transaction id of this server: a take finds it.
    UPDATE {schema}.outbox o SET xid = '2'
    WHERE id > after_id AND id <= last_id AND NOT pg_visible_in_snapshot(xid, since)
      AND EXISTS (SELECT FROM {schema}.outbox_delivery d WHERE d.event_id = o.id);
    -- Logical replication copies events, and not the sequence of their ids. Other transactions may take ids meanwhile: a gap is
    -- harmless.
    IF finished AND last_id >= (SELECT last_value + is_called::integer FROM {schema}.outbox_id_seq) THEN
        PERFORM setval(format('%I.outbox_id_seq', {name}), last_id + 10000);
    END IF;
END
$$;

-- Gives the next batch of events behind an id the deliveries that their types have by the stored routes. An event that has any
-- delivery, also a parked or discarded one, is left alone, and so is one that a relay has yet to route. Call it again with
-- last_id until it is finished.
CREATE FUNCTION {schema}.outbox_create_deliveries(after_id bigint DEFAULT 0, batch integer DEFAULT 10000,
    OUT last_id bigint, OUT finished boolean, OUT events integer, OUT deliveries integer)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
DECLARE
    examined    integer;
    missing     bigint[];
    inserted_at timestamptz := clock_timestamp();
BEGIN
    SELECT coalesce(max(e.id), after_id), count(*),
           array_agg(e.id) FILTER (WHERE NOT EXISTS (SELECT FROM {schema}.outbox_delivery d WHERE d.event_id = e.id) AND {schema}.outbox_is_routed(e.id))
    INTO last_id, examined, missing
    FROM (SELECT o.id FROM {schema}.outbox o WHERE o.id > after_id ORDER BY o.id LIMIT batch) e;
    finished := examined < batch;
    events := coalesce(cardinality(missing), 0);
    INSERT INTO {schema}.outbox_delivery (event_id, destination, joined, next_attempt_at, ordering_key, payload_bytes)
    SELECT DISTINCT e.id, coalesce(r.destination, ''), CASE WHEN k.key IS NULL OR e.available_at <= inserted_at THEN 0 END,
           greatest(e.available_at, inserted_at), k.key, octet_length(e.payload::text)
    FROM unnest(missing) m (id) CROSS JOIN LATERAL (SELECT * FROM {schema}.outbox o WHERE o.id = m.id LIMIT 1) e
    CROSS JOIN LATERAL (SELECT CASE WHEN octet_length(e.ordering_key) <= 255 THEN e.ordering_key END AS key) k
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

    $sql$, '{schema}', pg_catalog.quote_ident(pg_catalog.current_schema())),
    '{name}', pg_catalog.quote_literal(pg_catalog.current_schema()));
END
$do$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION outbox_count_change(), outbox_is_routed(bigint), outbox_cover_events(bigint, integer, pg_snapshot),
    outbox_create_deliveries(bigint, integer) FROM PUBLIC;

CREATE TRIGGER outbox_route_is_counted AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON outbox_route
    FOR EACH STATEMENT EXECUTE FUNCTION outbox_count_change();
CREATE TRIGGER outbox_destination_is_counted AFTER UPDATE ON outbox_destination FOR EACH ROW
    WHEN ((OLD.paused, OLD.breaker, OLD.breaker_relay_id) IS DISTINCT FROM (NEW.paused, NEW.breaker, NEW.breaker_relay_id))
    EXECUTE FUNCTION outbox_count_change();
CREATE TRIGGER outbox_destination_is_counted_when_new AFTER INSERT ON outbox_destination FOR EACH ROW
    WHEN (NEW.paused OR NEW.breaker <> 'closed') EXECUTE FUNCTION outbox_count_change();
CREATE TRIGGER outbox_destination_is_counted_when_gone AFTER DELETE ON outbox_destination FOR EACH ROW
    WHEN (OLD.paused OR OLD.breaker <> 'closed') EXECUTE FUNCTION outbox_count_change();

-- +goose Down
DROP TRIGGER outbox_destination_is_counted_when_gone ON outbox_destination;
DROP TRIGGER outbox_destination_is_counted_when_new ON outbox_destination;
DROP TRIGGER outbox_destination_is_counted ON outbox_destination;
DROP TRIGGER outbox_route_is_counted ON outbox_route;
DROP FUNCTION outbox_create_deliveries(bigint, integer);
DROP FUNCTION outbox_cover_events(bigint, integer, pg_snapshot);
DROP FUNCTION outbox_is_routed(bigint);
DROP FUNCTION outbox_count_change();
DROP TABLE outbox_undelivered;
DROP TABLE outbox_identity;
DROP TABLE outbox_intake;
DROP TABLE outbox_range;
DROP TABLE outbox_void;
DROP TABLE outbox_rescue;
DROP TABLE outbox_relay_route;
DROP TABLE outbox_relay_destination;
DROP TABLE outbox_relay;
