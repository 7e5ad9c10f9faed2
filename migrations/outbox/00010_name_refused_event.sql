-- A refusal says which event of a statement it means, as the DETAIL of a CHECK does.

-- +goose Up
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace(pg_catalog.replace($sql$

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
CREATE OR REPLACE FUNCTION {schema}.outbox_check_event(id bigint, event_type text, event_version integer, payload json, idempotency_key text,
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

    $sql$, '{schema}', pg_catalog.quote_ident(pg_catalog.current_schema())),
    '{name}', pg_catalog.quote_literal(pg_catalog.current_schema()));
END
$do$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION outbox_refuse(text, text) FROM PUBLIC;
DROP FUNCTION outbox_refuse(text);

-- +goose Down
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace(pg_catalog.replace($sql$

CREATE FUNCTION {schema}.outbox_refuse(rule text) RETURNS integer LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'new row for relation "outbox" violates check constraint "%"', rule
        USING ERRCODE = 'check_violation', CONSTRAINT = rule, TABLE = 'outbox', SCHEMA = {name};
END
$$;

CREATE OR REPLACE FUNCTION {schema}.outbox_check_event(id bigint, event_type text, event_version integer, payload json, idempotency_key text,
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

    $sql$, '{schema}', pg_catalog.quote_ident(pg_catalog.current_schema())),
    '{name}', pg_catalog.quote_literal(pg_catalog.current_schema()));
END
$do$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION outbox_refuse(text) FROM PUBLIC;
DROP FUNCTION outbox_refuse(text, text);
