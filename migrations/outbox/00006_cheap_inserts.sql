-- What an insert costs its producer: a CHECK of outbox_delivery was parsed anew for each, 20 us of 60, and so were nine rules that
-- nearly every event keeps. See docs/decisions/0058-cheap-inserts.md.

-- +goose Up
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace(pg_catalog.replace(pg_catalog.replace($sql$

-- Returns the bytes of an event's payload, or refuses the event. The rules stand in the alphabetical order of their names.
--
-- Text travels as HTTP headers, where only printable ASCII without surrounding blanks arrives unchanged. The length is
-- not a bound in the pattern: {1,255} takes PostgreSQL 25 us a value, this 0.5 us.
CREATE FUNCTION {schema}.outbox_check_event(id bigint, event_type text, event_version integer, payload json, idempotency_key text,
    ordering_key text, related_reference text, headers jsonb, available_at timestamptz) RETURNS integer LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    rule text := CASE
        -- An event of the year 9998 would hold its ordering key until then. Hours, because a day has 23 to 25 of them.
        WHEN available_at < '0001-01-01 00:00:00+00' OR available_at > now() + interval '8784 hours'
            THEN 'outbox_available_at_is_in_year_1_to_366_days_ahead'
        WHEN octet_length(event_type) NOT BETWEEN 1 AND 255 OR event_type ~ '[^\x21-\x7e]'
            THEN 'outbox_event_type_is_1_to_255_printable_ascii_no_blanks'
        WHEN event_version < 1 THEN 'outbox_event_version_is_positive'
        WHEN headers <> '{}' AND NOT {schema}.outbox_headers_are_fit(headers)
            THEN 'outbox_headers_have_unreserved_names_and_printable_values'
        WHEN id < 1 THEN 'outbox_id_is_positive' -- commands take none below
        WHEN octet_length(idempotency_key) NOT BETWEEN 1 AND 255 OR idempotency_key ~ '[^\x20-\x7e]|^ | $'
            THEN 'outbox_idempotency_key_is_1_to_255_printable_ascii'
        WHEN octet_length(ordering_key) NOT BETWEEN 1 AND 255 OR ordering_key ~ '[^\x20-\x7e]|^ | $'
            THEN 'outbox_ordering_key_is_1_to_255_printable_ascii'
        WHEN octet_length(related_reference) NOT BETWEEN 1 AND 255 OR related_reference ~ '[^\x20-\x7e]|^ | $'
            THEN 'outbox_related_reference_is_1_to_255_printable_ascii'
        WHEN octet_length(payload::text) > 1048576 THEN 'outbox_payload_is_at_most_1_mib'
    END;
BEGIN
    IF rule IS NOT NULL THEN
        PERFORM {schema}.outbox_refuse(rule);
    END IF;
    RETURN octet_length(payload::text);
END
$$;

-- Routing and fan-out happen in the producer's transaction: an event and its deliveries commit together or not at all. One
-- expression passes the events that break no rule at a glance: every text of them together is short, and has neither blanks nor
-- anything unprintable. All others go through the rules one by one.
CREATE OR REPLACE FUNCTION {schema}.outbox_fan_out() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    -- Not the transaction's start: an event that becomes due long before it commits would lie behind
    -- the position from which relays claim, and wait for their next sweep.
    inserted_at timestamptz := clock_timestamp();
BEGIN
    -- DISTINCT ON, because two patterns may lead to one destination. A plain DISTINCT compares every column.
    INSERT INTO {schema}.outbox_delivery (event_id, destination, next_attempt_at, ordering_key, payload_bytes)
    SELECT DISTINCT ON (e.id, r.destination) e.id, coalesce(r.destination, ''), greatest(e.available_at, inserted_at), e.ordering_key,
           CASE WHEN e.available_at >= '0001-01-01 00:00:00+00' AND e.available_at <= now() + interval '8784 hours'
                     AND least(e.id, e.event_version) > 0
                     AND (e.headers = '{}' OR {schema}.outbox_headers_are_fit(e.headers))
                     AND least(octet_length(e.event_type), octet_length(e.idempotency_key),
                               octet_length(e.ordering_key), octet_length(e.related_reference)) > 0
                     AND octet_length(concat(e.event_type, e.idempotency_key, e.ordering_key, e.related_reference)) <= 255
                     AND concat(e.event_type, e.idempotency_key, e.ordering_key, e.related_reference) COLLATE "C" !~ '[^\x21-\x7e]'
                     AND octet_length(e.payload::text) <= 1048576
                THEN octet_length(e.payload::text)
                ELSE {schema}.outbox_check_event(e.id, e.event_type, e.event_version, e.payload, e.idempotency_key,
                                                 e.ordering_key, e.related_reference, e.headers, e.available_at) END
    FROM new_event e LEFT JOIN {schema}.outbox_route r ON e.event_type LIKE r.like_pattern;

    -- FOUND: a duplicate that inserted nothing wakes no relay. A function reads the sequence, because a query would start the
    -- executor. A producer whose transactions are prepared (two-phase commit), where NOTIFY is not allowed, sets outbox.notify
    -- to off; relays then find its events by polling.
    IF FOUND AND pg_sequence_last_value({armed}) > date_part('epoch', inserted_at) * 1000
       AND coalesce(current_setting('outbox.notify', true), '') <> 'off'
       -- A session that listens and never ends its transaction fills the queue, and then no COMMIT that notifies succeeds.
       AND pg_notification_queue_usage() < 0.5 THEN
        PERFORM pg_notify('outbox_wake', TG_TABLE_SCHEMA);
    END IF;
    RETURN NULL;
END
$$;

-- Refuses a delivery as a CHECK would.
CREATE FUNCTION {schema}.outbox_refuse_delivery() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'new row for relation "outbox_delivery" violates check constraint "%"', TG_NAME
        USING ERRCODE = 'check_violation', CONSTRAINT = TG_NAME, TABLE = 'outbox_delivery', SCHEMA = {name},
              DETAIL = format('The delivery is that of event %s to %s.', NEW.event_id, NEW.destination);
END
$$;

    $sql$, '{schema}', pg_catalog.quote_ident(pg_catalog.current_schema())),
    '{name}', pg_catalog.quote_literal(pg_catalog.current_schema())),
    '{armed}', pg_catalog.quote_literal(pg_catalog.format('%I.outbox_armed', pg_catalog.current_schema())));
END
$do$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION outbox_check_event(bigint, text, integer, json, text, text, text, jsonb, timestamptz), outbox_refuse_delivery()
    FROM PUBLIC;

-- Instead of the CHECK, for updates alone: inserts write five columns, of which none can make a row insane.
CREATE TRIGGER outbox_delivery_columns_are_sane AFTER UPDATE ON outbox_delivery FOR EACH ROW WHEN (NOT (
    NEW.status IN ('pending', 'delivered', 'failed', 'discarded')
    AND (NEW.status = 'delivered') = (NEW.delivered_at IS NOT NULL)
    AND (NEW.claimed_by IS NULL) = (NEW.lease_expires_at IS NULL)
    AND (NEW.status = 'pending' OR NEW.claimed_by IS NULL)
    AND NEW.attempts >= 0 AND NEW.claim >= 0 AND NEW.rescues >= 0
    AND isfinite(NEW.next_attempt_at) AND coalesce(isfinite(NEW.not_after), true)
)) EXECUTE FUNCTION outbox_refuse_delivery();
ALTER TABLE outbox_delivery DROP CONSTRAINT outbox_delivery_columns_are_sane;

-- +goose Down
DROP TRIGGER outbox_delivery_columns_are_sane ON outbox_delivery;
-- NOT VALID: producers do not wait until all rows are read. Every row that was written since kept the rule.
ALTER TABLE outbox_delivery ADD CONSTRAINT outbox_delivery_columns_are_sane CHECK (
    status IN ('pending', 'delivered', 'failed', 'discarded')
    AND (status = 'delivered') = (delivered_at IS NOT NULL)
    AND (claimed_by IS NULL) = (lease_expires_at IS NULL)
    AND (status = 'pending' OR claimed_by IS NULL)
    AND attempts >= 0 AND claim >= 0 AND rescues >= 0
    AND isfinite(next_attempt_at) AND coalesce(isfinite(not_after), true)) NOT VALID;
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace(pg_catalog.replace($sql$

CREATE OR REPLACE FUNCTION {schema}.outbox_fan_out() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
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

    $sql$, '{schema}', pg_catalog.quote_ident(pg_catalog.current_schema())),
    '{name}', pg_catalog.quote_literal(pg_catalog.current_schema()));
END
$do$;
-- +goose StatementEnd
DROP FUNCTION outbox_refuse_delivery();
DROP FUNCTION outbox_check_event(bigint, text, integer, json, text, text, text, jsonb, timestamptz);
