-- Each event carries the id of its transaction, and relays find new events by the difference of two snapshots. Until the switch,
-- in 00015, the trigger goes on making deliveries. See docs/decisions/0069-intake-by-snapshot-difference.md.

-- +goose Up
-- Not pg_current_xact_id() yet: a constant default is stored once, a volatile one would rewrite the table. Transaction 2 is
-- visible in every snapshot, so that no relay takes the events from before the switch.
ALTER TABLE outbox ADD COLUMN xid xid8 NOT NULL DEFAULT '2';
COMMENT ON COLUMN outbox.xid IS 'The transaction that inserted the event. 2: its deliveries were made when it was inserted, or by outbox_cover_events.';

-- The two rules without which an event cannot be named or routed; relays check the others when they route. A domain, because
-- PostgreSQL parses a CHECK of the table again for each statement. The domains get their rules after the columns get the
-- domains: with rules, PostgreSQL would rewrite the table. NOT VALID: it would also read it. They may be there already, see Down.
-- +goose StatementBegin
DO $$
BEGIN
    IF pg_catalog.to_regtype(pg_catalog.format('%I.outbox_event_type', pg_catalog.current_schema())) IS NULL THEN
        CREATE DOMAIN outbox_event_type AS text COLLATE "C";
        CREATE DOMAIN outbox_idempotency_key AS text COLLATE "C";
    END IF;
END
$$;
-- +goose StatementEnd
ALTER TABLE outbox ALTER COLUMN event_type TYPE outbox_event_type, ALTER COLUMN idempotency_key TYPE outbox_idempotency_key;
ALTER DOMAIN outbox_event_type ADD CONSTRAINT outbox_event_type_is_1_to_255_printable_ascii_no_blanks
    CHECK (octet_length(value) BETWEEN 1 AND 255 AND value !~ '[^\x21-\x7e]') NOT VALID;
ALTER DOMAIN outbox_idempotency_key ADD CONSTRAINT outbox_idempotency_key_is_1_to_255_printable_ascii
    CHECK (octet_length(value) BETWEEN 1 AND 255 AND value !~ '[^\x20-\x7e]|^ | $') NOT VALID;

-- An event never changes. Its xid is no part of it.
CREATE OR REPLACE TRIGGER outbox_is_immutable BEFORE UPDATE OF id, event_type, event_version, payload, idempotency_key, ordering_key,
    related_reference, headers, available_at, created_at ON outbox FOR EACH ROW EXECUTE FUNCTION outbox_refuse_update();

-- The last row is how far all relays have come. It is inserted, never updated, so that reading it costs the same while
-- vacuum is blocked. Its primary key is the lock of the takers.
CREATE TABLE outbox_range (
    seq      bigint      PRIMARY KEY,
    relay    integer     NOT NULL,
    fence    bigint      NOT NULL,
    base     pg_snapshot NOT NULL,
    target   pg_snapshot NOT NULL,
    low      bigint      NOT NULL,
    upto     bigint      NOT NULL,
    young    bigint,
    more     boolean     NOT NULL,
    oldest   bigint      NOT NULL,
    keys     integer[],
    promised interval    NOT NULL DEFAULT '0',
    taken_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at timestamptz
) WITH (fillfactor = 50);

COMMENT ON TABLE outbox_range IS 'Events that a relay has taken together: those visible in target and not in base, with ids above low and up to upto. The last row is how far all relays have come.';
COMMENT ON COLUMN outbox_range.fence IS 'Grows with the clock at each take and rescue. A settle with another number writes nothing.';
COMMENT ON COLUMN outbox_range.young IS 'NULL: the range is a whole difference. Otherwise it was cut by id: transactions from xmax(base) on have no event up to this id.';
COMMENT ON COLUMN outbox_range.more IS 'The difference of base and target has events above upto. The next range continues it.';
COMMENT ON COLUMN outbox_range.oldest IS 'No range before this one was open when the range was taken.';
COMMENT ON COLUMN outbox_range.keys IS 'Hashes of the ordering keys of its events. NULL: none has a key.';
COMMENT ON COLUMN outbox_range.promised IS 'The shortest X-Outbox-Not-After that its relay may have told a receiver, counted from taken_at.';
COMMENT ON COLUMN outbox_range.ended_at IS 'When each of its deliveries had a row. NULL: the range is open.';

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
INSERT INTO outbox_intake DEFAULT VALUES;

COMMENT ON TABLE outbox_intake IS 'The server whose transaction ids outbox and outbox_range have. 0: it did not tell its identifier or timeline.';
COMMENT ON COLUMN outbox_intake.routes IS 'Grows with each change of outbox_route.';
COMMENT ON COLUMN outbox_intake.destinations IS 'Grows whenever a destination is paused or resumed, or its breaker changes.';

-- A DEFAULT runs with the rights of the producer, who needs no right but INSERT on outbox.
GRANT SELECT ON SEQUENCE outbox_armed TO PUBLIC;

-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace(pg_catalog.replace($sql$

-- Returns the transaction's id, and wakes relays when it commits. The trigger of events explains the conditions.
CREATE FUNCTION {schema}.outbox_wake() RETURNS xid8 LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF coalesce(current_setting('outbox.notify', true), '') <> 'off' AND pg_notification_queue_usage() < 0.5 THEN
        PERFORM pg_notify('outbox_wake', {name});
    END IF;
    RETURN pg_current_xact_id();
END
$$;

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

-- Reports whether each delivery of an event that is not in outbox_delivery is missing for good. Otherwise a relay has yet to take the
-- event, or has it in hand.
CREATE FUNCTION {schema}.outbox_is_routed(event_id bigint) RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    SELECT pg_visible_in_snapshot(
        (SELECT o.xid FROM {schema}.outbox o WHERE o.id = event_id LIMIT 1),
        (SELECT coalesce((SELECT o.base FROM {schema}.outbox_range o WHERE o.seq >= l.oldest AND o.ended_at IS NULL ORDER BY o.seq LIMIT 1),
                         CASE WHEN l.more THEN l.base ELSE l.target END)
         FROM (SELECT * FROM {schema}.outbox_range ORDER BY seq DESC LIMIT 1) l))
$$;

-- Makes pending deliveries of the next events, in the order of their ids, for a switch or another server: of those without any,
-- and of those that were in hand or not yet taken. It marks all events that are not visible in since, so that no relay takes
-- them again: their transaction ids may come from another server.
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
    SELECT coalesce((SELECT o.base FROM {schema}.outbox_range o WHERE o.seq >= l.oldest AND o.ended_at IS NULL ORDER BY o.seq LIMIT 1),
                    CASE WHEN l.more THEN l.base ELSE l.target END)
    INTO settled FROM (SELECT * FROM {schema}.outbox_range ORDER BY seq DESC LIMIT 1) l;
    SELECT coalesce(max(e.id), after_id), count(*) < batch INTO last_id, finished
    FROM (SELECT o.id FROM {schema}.outbox o WHERE o.id > after_id ORDER BY o.id LIMIT batch) e;
    WITH covered AS (
        INSERT INTO {schema}.outbox_delivery (event_id, destination, next_attempt_at, ordering_key, payload_bytes)
        SELECT DISTINCT ON (e.id, r.destination) e.id, coalesce(r.destination, ''), greatest(e.available_at, inserted_at), e.ordering_key,
               octet_length(e.payload::text)
        FROM {schema}.outbox e LEFT JOIN {schema}.outbox_route r ON e.event_type LIKE r.like_pattern
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
    UPDATE {schema}.outbox SET xid = '2'
    WHERE id > after_id AND id <= last_id AND NOT pg_visible_in_snapshot(xid, since);
END
$$;

    $sql$, '{schema}', pg_catalog.quote_ident(pg_catalog.current_schema())),
    '{name}', pg_catalog.quote_literal(pg_catalog.current_schema()));
END
$do$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION outbox_cover_events(bigint, integer, pg_snapshot) FROM PUBLIC;
-- A producer's DEFAULT calls it. It tells relays no more than any session can.
GRANT EXECUTE ON FUNCTION outbox_wake() TO PUBLIC;
REVOKE ALL ON FUNCTION outbox_count_change(), outbox_is_routed(bigint) FROM PUBLIC;

CREATE TRIGGER outbox_route_is_counted AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON outbox_route
    FOR EACH STATEMENT EXECUTE FUNCTION outbox_count_change();
CREATE TRIGGER outbox_destination_is_counted AFTER UPDATE ON outbox_destination FOR EACH ROW
    WHEN ((OLD.paused, OLD.breaker, OLD.breaker_owner) IS DISTINCT FROM (NEW.paused, NEW.breaker, NEW.breaker_owner))
    EXECUTE FUNCTION outbox_count_change();
CREATE TRIGGER outbox_destination_is_counted_when_new AFTER INSERT ON outbox_destination FOR EACH ROW
    WHEN (NEW.paused OR NEW.breaker <> 'closed') EXECUTE FUNCTION outbox_count_change();
CREATE TRIGGER outbox_destination_is_counted_when_gone AFTER DELETE ON outbox_destination FOR EACH ROW
    WHEN (OLD.paused OR OLD.breaker <> 'closed') EXECUTE FUNCTION outbox_count_change();

ALTER TABLE outbox ALTER COLUMN xid SET DEFAULT
    CASE WHEN pg_sequence_last_value('outbox_armed'::regclass)::float8 > date_part('epoch', clock_timestamp()) * 1000::float8
         THEN outbox_wake() ELSE pg_current_xact_id() END;

-- +goose Down
DROP TRIGGER outbox_destination_is_counted_when_gone ON outbox_destination;
DROP TRIGGER outbox_destination_is_counted_when_new ON outbox_destination;
DROP TRIGGER outbox_destination_is_counted ON outbox_destination;
DROP TRIGGER outbox_route_is_counted ON outbox_route;
DROP FUNCTION outbox_count_change();
DROP FUNCTION outbox_is_routed(bigint);
DROP FUNCTION outbox_cover_events(bigint, integer, pg_snapshot);
DROP TABLE outbox_intake;
DROP TABLE outbox_range;
CREATE OR REPLACE TRIGGER outbox_is_immutable BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION outbox_refuse_update();
ALTER TABLE outbox DROP COLUMN xid, ALTER COLUMN event_type TYPE text COLLATE "C", ALTER COLUMN idempotency_key TYPE text COLLATE "C";
DROP FUNCTION outbox_wake();
-- The domains stay, without their rules: a statement that a producer has prepared has a parameter of the domain's type, and without
-- the type it would fail until the producer connects again.
ALTER DOMAIN outbox_idempotency_key DROP CONSTRAINT outbox_idempotency_key_is_1_to_255_printable_ascii;
ALTER DOMAIN outbox_event_type DROP CONSTRAINT outbox_event_type_is_1_to_255_printable_ascii_no_blanks;
REVOKE SELECT ON SEQUENCE outbox_armed FROM PUBLIC;
