-- Header names that an event may not bring, refused where it is inserted; and the search for events without deliveries.

-- +goose Up
-- The list is that of ReservedForEvents in internal/webhook. A function and not part of the CHECK: PostgreSQL reads the
-- text of a table's CHECKs anew for every statement, and an event without headers never calls it.
-- +goose StatementBegin
CREATE FUNCTION outbox_headers_are_fit(headers jsonb) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
DECLARE
    -- As jsonb prints an object of strings: {"a": "1", "b": "2"}. A quote within a value has a backslash before it. The
    -- collation is C, as a Turkish one has other capitals. Regular expressions cost a tenth of what jsonpath does.
    printed pg_catalog.text COLLATE pg_catalog."C" := headers::pg_catalog.text;
BEGIN
    RETURN pg_catalog.octet_length(printed) OPERATOR(pg_catalog.<=) 8192
       AND printed OPERATOR(pg_catalog.~) '^\{"[-!#$%&''*+.^_`|~0-9A-Za-z]+": "([ !#-[^-~]|\]|\\["\\])*"(, "[-!#$%&''*+.^_`|~0-9A-Za-z]+": "([ !#-[^-~]|\]|\\["\\])*")*\}$'
       -- CGI, WSGI and PHP make the same name of X-Real-Ip and X_Real_Ip.
       AND printed OPERATOR(pg_catalog.!~*) '(^\{|", )"(authorization|connection|content[-_](encoding|length|type)|cookie|expect|forwarded|host|keep[-_]alive|te|trailer|transfer[-_]encoding|true[-_]client[-_]ip|upgrade|user[-_]agent|x[-_](client[-_]ip|http[-_]method([-_]override)?|idempotency[-_]key|method[-_]override|real[-_]ip|rewrite[-_]url)|(proxy|webhook|x[-_](forwarded|original|outbox))[-_][^"]*)": ';
END
$$;
-- +goose StatementEnd

ALTER TABLE outbox
    DROP CONSTRAINT outbox_headers_are_http_names_with_printable_string_values,
    -- Not validated: of events that are there already, relays leave reserved headers out.
    ADD CONSTRAINT outbox_headers_have_unreserved_names_and_printable_values
        CHECK (headers = '{}' OR outbox_headers_are_fit(headers)) NOT VALID;

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

-- Gives the next batch of events behind an id the deliveries that the trigger would have made. An event that has any
-- delivery, also a parked or discarded one, is left alone. Call it again with last_id until it is finished.
-- +goose StatementBegin
CREATE FUNCTION outbox_create_deliveries(after_id bigint DEFAULT 0, batch integer DEFAULT 10000,
    OUT last_id bigint, OUT finished boolean, OUT events integer, OUT deliveries integer)
LANGUAGE plpgsql AS $$
DECLARE
    looked_at   integer;
    missing     bigint[];
    inserted_at timestamptz := clock_timestamp();
BEGIN
    SELECT coalesce(max(e.id), after_id), count(*),
           array_agg(e.id) FILTER (WHERE NOT EXISTS (SELECT FROM outbox_delivery d WHERE d.event_id = e.id))
    INTO last_id, looked_at, missing
    FROM (SELECT o.id FROM outbox o WHERE o.id > after_id ORDER BY o.id LIMIT batch) e;
    finished := looked_at < batch;
    events := coalesce(cardinality(missing), 0);
    INSERT INTO outbox_delivery (event_id, destination, next_attempt_at, ordering_key, payload_bytes)
    SELECT DISTINCT e.id, coalesce(r.destination, ''), greatest(e.available_at, inserted_at), e.ordering_key,
           octet_length(e.payload::text)
    FROM unnest(missing) m (id) CROSS JOIN LATERAL (SELECT * FROM outbox o WHERE o.id = m.id LIMIT 1) e
    LEFT JOIN outbox_route r ON e.event_type LIKE r.like_pattern
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS deliveries = ROW_COUNT;
    -- They are behind later events of their ordering keys that are settled.
    INSERT INTO outbox_destination AS t (destination, reordered)
    SELECT DISTINCT d.destination, 1::bigint FROM outbox_delivery d
    WHERE d.event_id = ANY (missing) AND d.ordering_key IS NOT NULL AND d.destination <> '' ORDER BY 1
    ON CONFLICT (destination) DO UPDATE SET reordered = t.reordered + 1;
END
$$;
-- +goose StatementEnd

-- +goose StatementBegin
DO $$
DECLARE
    setting text;
BEGIN
    EXECUTE format('ALTER FUNCTION outbox_create_deliveries(bigint, integer) SET search_path = %I, pg_temp', current_schema());
    FOREACH setting IN ARRAY ARRAY [
        'enable_seqscan = off', 'enable_hashjoin = off', 'enable_mergejoin = off', 'enable_bitmapscan = off', 'jit = off'] LOOP
        EXECUTE format('ALTER FUNCTION outbox_create_deliveries(bigint, integer) SET %s', setting);
    END LOOP;
END
$$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION outbox_create_deliveries(bigint, integer) FROM PUBLIC;

-- Relays of earlier versions write columns that are gone, and would not see which claims have ended.
CREATE OR REPLACE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 16';

-- +goose Down
CREATE OR REPLACE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 9';
DROP FUNCTION outbox_create_deliveries(bigint, integer);
DROP TABLE outbox_undelivered;
ALTER TABLE outbox
    DROP CONSTRAINT outbox_headers_have_unreserved_names_and_printable_values,
    ADD CONSTRAINT outbox_headers_are_http_names_with_printable_string_values CHECK (
        headers = '{}'
        OR (jsonb_typeof(headers) = 'object'
            AND octet_length(headers::text) <= 8192
            AND NOT jsonb_path_exists(headers, '$.keyvalue() ? (!(@.key like_regex "^[-!#$%&''*+.^_`|~0-9A-Za-z]+$"))')
            AND NOT jsonb_path_exists(headers, 'strict $.* ? (@.type() != "string" || !(@ like_regex "^[\\x20-\\x7e]*$"))')));
DROP FUNCTION outbox_headers_are_fit(jsonb);
