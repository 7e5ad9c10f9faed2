-- What only the trigger of events used goes: it made deliveries and kept the rules, and the switch, in 00015, has dropped it. Down restores
-- the functions with their default rights: run the roles.sql of the version that you return to.

-- +goose Up
DROP FUNCTION outbox_fan_out();
DROP FUNCTION outbox_check_event(bigint, text, integer, json, text, text, text, jsonb, timestamptz);
DROP FUNCTION outbox_refuse(text, text);
DROP FUNCTION outbox_headers_are_fit(jsonb);
COMMENT ON TABLE outbox IS 'Events, written once by producers inside their own transactions. Relays take them and write their deliveries.';

-- +goose Down
COMMENT ON TABLE outbox IS 'Events, written once by producers inside their own transactions; deliveries are created by trigger.';
-- +goose StatementBegin
-- Header names and values that an event may bring.
CREATE FUNCTION outbox_headers_are_fit(headers jsonb) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    -- As jsonb prints an object of strings: {"a": "1", "b": "2"}. A quote within a value has a backslash before it. The
    -- collation is C, as a Turkish one has other capitals. Regular expressions cost a tenth of what jsonpath does.
    printed pg_catalog.text COLLATE pg_catalog."C" := headers::pg_catalog.text;
BEGIN
    RETURN pg_catalog.octet_length(printed) OPERATOR(pg_catalog.<=) 8192
       AND printed OPERATOR(pg_catalog.~) '^\{"[-!#$%&''*+.^_`|~0-9A-Za-z]+": "([ !#-[^-~]|\]|\\["\\])*"(, "[-!#$%&''*+.^_`|~0-9A-Za-z]+": "([ !#-[^-~]|\]|\\["\\])*")*\}$'
       -- Receivers make the same name of X-Real-Ip, X_Real_Ip and X.Real~Ip: CGI, WSGI and PHP of some, Apache and lighttpd of all.
       AND printed OPERATOR(pg_catalog.!~*)
           '(^\{|", )"(accept[^0-9A-Za-z"]encoding|authorization|cf[^0-9A-Za-z"]connecting[^0-9A-Za-z"]ip|connection'
           '|content[^0-9A-Za-z"]encoding|content[^0-9A-Za-z"]length|content[^0-9A-Za-z"]type|cookie|expect'
           '|fastly[^0-9A-Za-z"]client[^0-9A-Za-z"]ip|forwarded|forwarded[^0-9A-Za-z"]for|host|http2[^0-9A-Za-z"]settings'
           '|keep[^0-9A-Za-z"]alive|proxy|proxy[^0-9A-Za-z"][^"]*|remote[^0-9A-Za-z"]user|te|trailer|transfer[^0-9A-Za-z"]encoding'
           '|true[^0-9A-Za-z"]client[^0-9A-Za-z"]ip|upgrade|user[^0-9A-Za-z"]agent|via|webhook[^0-9A-Za-z"][^"]*'
           '|x[^0-9A-Za-z"]client[^0-9A-Za-z"]ip|x[^0-9A-Za-z"]cluster[^0-9A-Za-z"]client[^0-9A-Za-z"]ip'
           '|x[^0-9A-Za-z"]envoy[^0-9A-Za-z"][^"]*|x[^0-9A-Za-z"]forwarded|x[^0-9A-Za-z"]forwarded[^0-9A-Za-z"][^"]*'
           '|x[^0-9A-Za-z"]http[^0-9A-Za-z"]method|x[^0-9A-Za-z"]http[^0-9A-Za-z"]method[^0-9A-Za-z"]override'
           '|x[^0-9A-Za-z"]idempotency[^0-9A-Za-z"]key|x[^0-9A-Za-z"]method[^0-9A-Za-z"]override|x[^0-9A-Za-z"]original'
           '|x[^0-9A-Za-z"]original[^0-9A-Za-z"][^"]*|x[^0-9A-Za-z"]originating[^0-9A-Za-z"][^"]*'
           '|x[^0-9A-Za-z"]outbox[^0-9A-Za-z"][^"]*|x[^0-9A-Za-z"]real[^0-9A-Za-z"]ip|x[^0-9A-Za-z"]remote[^0-9A-Za-z"][^"]*'
           '|x[^0-9A-Za-z"]rewrite[^0-9A-Za-z"]url)": ';
END
$$;
-- +goose StatementEnd
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace(pg_catalog.replace(pg_catalog.replace($sql$

-- Refuses an event as a CHECK of outbox would. The name of each rule says it, because that name is all that some producers see.
CREATE FUNCTION {schema}.outbox_refuse(rule text, idempotency_key text) RETURNS integer LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'new row for relation "outbox" violates check constraint "%"', rule
        USING ERRCODE = 'check_violation', CONSTRAINT = rule, TABLE = 'outbox', SCHEMA = {name},
              DETAIL = format('The event has the idempotency key %L.', left(idempotency_key, 255));
END
$$;

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
        PERFORM {schema}.outbox_refuse(rule, idempotency_key);
    END IF;
    RETURN octet_length(payload::text);
END
$$;

-- Routing and fan-out happen in the producer's transaction: an event and its deliveries commit together or not at all. One
-- expression passes the events that break no rule at a glance: every text of them together is short, and has neither blanks nor
-- anything unprintable. All others go through the rules one by one.
CREATE FUNCTION {schema}.outbox_fan_out() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off AS $$
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

    $sql$, '{schema}', pg_catalog.quote_ident(pg_catalog.current_schema())),
    '{name}', pg_catalog.quote_literal(pg_catalog.current_schema())),
    '{armed}', pg_catalog.quote_literal(pg_catalog.format('%I.outbox_armed', pg_catalog.current_schema())));
END
$do$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION outbox_fan_out(), outbox_refuse(text, text),
    outbox_check_event(bigint, text, integer, json, text, text, text, jsonb, timestamptz) FROM PUBLIC;
