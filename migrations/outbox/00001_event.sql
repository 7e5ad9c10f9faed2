-- The event: written once, inside the producer's own transaction, and never updated.
-- Names are unqualified: the schema is the first one on the connection's search_path.

-- +goose Up
-- The rules without which an event cannot be named, routed or archived. Relays check the others when they route. They are domains,
-- because PostgreSQL parses the CHECKs of a table again for every statement, some 8 us each. See docs/decisions/0058-cheap-inserts.md.
CREATE DOMAIN outbox_event_type AS text COLLATE "C"
    CONSTRAINT outbox_event_type_is_1_to_255_printable_ascii_no_blanks
    CHECK (octet_length(value) BETWEEN 1 AND 255 AND value !~ '[^\x21-\x7e]');
CREATE DOMAIN outbox_idempotency_key AS text COLLATE "C"
    CONSTRAINT outbox_idempotency_key_is_1_to_255_printable_ascii
    CHECK (octet_length(value) BETWEEN 1 AND 255 AND value !~ '[^\x20-\x7e]|^ | $');
-- Each month becomes a partition of the archive, and most drivers cannot scan an infinite time.
CREATE DOMAIN outbox_created_at AS timestamptz
    CONSTRAINT outbox_created_at_is_in_years_2000_to_9998
    CHECK (value >= '2000-01-01 00:00:00+00' AND value < '9999-01-01 00:00:00+00');

-- Until when relays want to be notified, in milliseconds since 1970. A sequence is one row that is written in place:
-- whatever blocks vacuum, it costs producers the same to read.
CREATE SEQUENCE outbox_armed MINVALUE 0 START 0;
-- A DEFAULT runs with the rights of the producer, who needs no right but INSERT on outbox.
GRANT SELECT ON SEQUENCE outbox_armed TO PUBLIC;

-- In this function, and in others of these files, only pg_catalog is searched for names: PostgreSQL takes the better match of two
-- functions or operators wherever on the path they are, and never looks for them in pg_temp. So what is of the outbox is qualified,
-- with the schema that the migration runs in: {schema} stands for its name, {name} for that as a literal. The DO block itself
-- qualifies what it calls for the same reason. See docs/decisions/0038-least-privilege.md.
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace(pg_catalog.replace($sql$

-- Returns the transaction's id, and wakes relays when it commits. A producer whose transactions are prepared (two-phase commit),
-- where NOTIFY is not allowed, sets outbox.notify to off; relays then find its events by polling. A session that listens and never
-- ends its transaction fills the queue, and then no COMMIT that notifies succeeds. outbox.woken keeps a transaction from calling this
-- for each of its events, and tells the outboxes of several schemas apart; a savepoint that is rolled back takes both back. After the
-- schema was renamed, each event calls it: then no relay wakes, and no insert is refused.
CREATE FUNCTION {schema}.outbox_wake() RETURNS xid8 LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF coalesce(current_setting('outbox.notify', true), '') <> 'off' AND pg_notification_queue_usage() < 0.5 THEN
        PERFORM pg_notify('outbox_wake', {name});
    END IF;
    PERFORM set_config('outbox.woken', pg_current_xact_id() || ' ' || coalesce(to_regclass(format('%I.outbox_armed', {name}::text))::oid, 0), true);
    RETURN pg_current_xact_id();
END
$$;

-- After a TRUNCATE with RESTART IDENTITY, new events would have the ids of old ones, and with them their deliveries.
CREATE FUNCTION {schema}.outbox_refuse_truncate() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.outbox_delivery) THEN
        RAISE EXCEPTION 'outbox: events have deliveries'
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Stop all relays and TRUNCATE outbox_delivery, outbox_attempt first.';
    END IF;
    RETURN NULL;
END
$$;

    $sql$, '{schema}', pg_catalog.quote_ident(pg_catalog.current_schema())),
    '{name}', pg_catalog.quote_literal(pg_catalog.current_schema()));
END
$do$;
-- +goose StatementEnd
-- A producer's DEFAULT calls it. It tells relays no more than any session can.
GRANT EXECUTE ON FUNCTION outbox_wake() TO PUBLIC;
REVOKE ALL ON FUNCTION outbox_refuse_truncate() FROM PUBLIC;

CREATE TABLE outbox (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_type        outbox_event_type      NOT NULL,
    event_version     integer                NOT NULL DEFAULT 1,
    -- json, not jsonb: the receiver gets the very bytes the producer wrote (jsonb reorders keys, drops
    -- duplicates, rewrites 1e3 as 1000 and refuses \u0000).
    payload           json                   NOT NULL,
    idempotency_key   outbox_idempotency_key NOT NULL,
    ordering_key      text COLLATE "C",
    related_reference text,
    headers           jsonb                  NOT NULL DEFAULT '{}',
    available_at      timestamptz            NOT NULL DEFAULT now(),
    created_at        outbox_created_at      NOT NULL DEFAULT now(),
    -- A function reads the sequence, because a query would start the executor.
    xid               xid8                   NOT NULL DEFAULT
        CASE WHEN pg_sequence_last_value('outbox_armed'::regclass)::float8 > date_part('epoch', clock_timestamp()) * 1000::float8
              AND coalesce(current_setting('outbox.woken', true), '') <> pg_current_xact_id()::text || ' '::text || 'outbox_armed'::regclass::oid::text
             THEN outbox_wake() ELSE pg_current_xact_id() END,
    CONSTRAINT outbox_idempotency_key_is_unique UNIQUE (idempotency_key)
) WITH (
    -- Events come and go: vacuum after a twentieth of them, not after a fifth.
    autovacuum_vacuum_scale_factor = 0.05,
    toast.autovacuum_vacuum_scale_factor = 0.05
);

COMMENT ON TABLE outbox IS 'Events, written once by producers inside their own transactions. Relays take them and write their deliveries.';
COMMENT ON COLUMN outbox.xid IS 'The transaction that inserted the event. 2: its deliveries were made by outbox_cover_events.';

-- By this index relays find the events of new transactions. It grows at its end. Its condition keeps it from the lookup of an event
-- by its id, for which a plan that was made on an empty table would read all of it.
CREATE INDEX outbox_by_xid ON outbox (xid, id) WHERE xid > '2';

-- +goose StatementBegin
CREATE FUNCTION outbox_refuse_update() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'outbox: event % is immutable; insert a new event instead', OLD.id
        USING ERRCODE = 'integrity_constraint_violation';
END
$$;
-- +goose StatementEnd

-- xid is no part of the event.
CREATE TRIGGER outbox_is_immutable BEFORE UPDATE OF id, event_type, event_version, payload, idempotency_key, ordering_key,
    related_reference, headers, available_at, created_at ON outbox FOR EACH ROW EXECUTE FUNCTION outbox_refuse_update();

CREATE TRIGGER outbox_keeps_deliveries BEFORE TRUNCATE ON outbox FOR EACH STATEMENT EXECUTE FUNCTION outbox_refuse_truncate();

-- A producer learns whether an event is a duplicate without the right to read events.
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace($sql$

-- Compares events with what is stored under their keys, for Enqueue of package outbox. written_by is -1 for an event of
-- another transaction, and otherwise the number of the command of this one that inserted it. A transaction holds its own ids locked,
-- also those of its savepoints. differs names the columns that are not the event's, with commas between.
CREATE FUNCTION {schema}.outbox_compare_events(types text[], versions integer[], payloads json[], keys text[], orderings text[], related text[], header_sets jsonb[],
    OUT number bigint, OUT found boolean, OUT written_by bigint, OUT differs text)
RETURNS SETOF record LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
    SELECT e.number - 1, o.id IS NOT NULL,
           CASE WHEN o.xmin IN (SELECT transactionid FROM pg_locks WHERE locktype = 'transactionid' AND pid = pg_backend_pid())
                THEN o.cmin::text::bigint ELSE -1 END,
           concat_ws(',', CASE WHEN o.event_type <> e.event_type THEN 'event_type' END,
                          CASE WHEN o.event_version <> e.event_version THEN 'event_version' END,
                          CASE WHEN o.payload::text <> e.payload::text THEN 'payload' END,
                          CASE WHEN o.ordering_key IS DISTINCT FROM e.ordering_key THEN 'ordering_key' END,
                          CASE WHEN o.related_reference IS DISTINCT FROM e.related_reference THEN 'related_reference' END,
                          CASE WHEN (SELECT jsonb_object_agg(key, value) FROM jsonb_each(o.headers)
                                     WHERE lower(key) NOT IN ('traceparent', 'tracestate', 'baggage'))
                                    IS DISTINCT FROM
                                    (SELECT jsonb_object_agg(key, value) FROM jsonb_each(e.headers)
                                     WHERE lower(key) NOT IN ('traceparent', 'tracestate', 'baggage'))
                               THEN 'headers' END)
    FROM unnest(types, versions, payloads, keys, orderings, related, header_sets) WITH ORDINALITY
         AS e (event_type, event_version, payload, idempotency_key, ordering_key, related_reference, headers, number)
    LEFT JOIN {schema}.outbox o ON o.idempotency_key = e.idempotency_key
    ORDER BY e.number
$$;

    $sql$, '{schema}', pg_catalog.quote_ident(pg_catalog.current_schema()));
END
$do$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION outbox_compare_events(text[], integer[], json[], text[], text[], text[], jsonb[]) FROM PUBLIC;
COMMENT ON FUNCTION outbox_compare_events(text[], integer[], json[], text[], text[], text[], jsonb[]) IS 'Compares events with those that hold their idempotency keys. Producers of every age call it, so its parameters and results never change: a further column of the content needs a second function.';

-- A later migration that programs of an earlier version cannot work with replaces this function; one that only adds
-- leaves it as it is.
CREATE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 6';
COMMENT ON FUNCTION outbox_compatible_since() IS 'The oldest schema version whose programs work with this schema.';

-- +goose Down
DROP FUNCTION outbox_compatible_since();
DROP FUNCTION outbox_compare_events(text[], integer[], json[], text[], text[], text[], jsonb[]);
DROP TABLE outbox;
DROP FUNCTION outbox_refuse_update();
DROP FUNCTION outbox_refuse_truncate();
DROP FUNCTION outbox_wake();
DROP SEQUENCE outbox_armed;
DROP DOMAIN outbox_created_at;
DROP DOMAIN outbox_idempotency_key;
DROP DOMAIN outbox_event_type;
