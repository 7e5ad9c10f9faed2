-- The event: written once, inside the producer's own transaction, and never updated.
-- Names are unqualified: the schema is the first one on the connection's search_path.
-- The name of every constraint says its rule, because that name is all a producer sees when a row is refused.

-- +goose Up
CREATE TABLE outbox (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_type        text COLLATE "C" NOT NULL,
    event_version     integer          NOT NULL DEFAULT 1,
    -- json, not jsonb: the receiver gets the very bytes the producer wrote (jsonb reorders keys, drops
    -- duplicates, rewrites 1e3 as 1000 and refuses \u0000).
    payload           json             NOT NULL,
    idempotency_key   text COLLATE "C" NOT NULL,
    ordering_key      text COLLATE "C",
    related_reference text,
    headers           jsonb            NOT NULL DEFAULT '{}',
    available_at      timestamptz      NOT NULL DEFAULT now(),
    created_at        timestamptz      NOT NULL DEFAULT now(),

    CONSTRAINT outbox_idempotency_key_is_unique UNIQUE (idempotency_key),
    -- These four travel as HTTP headers, where only printable ASCII without surrounding blanks arrives unchanged.
    -- The length is not a bound in the pattern: {1,255} takes PostgreSQL 25 us a value, this 0.5 us.
    CONSTRAINT outbox_event_type_is_1_to_255_printable_ascii_no_blanks
        CHECK (octet_length(event_type) BETWEEN 1 AND 255 AND event_type !~ '[^\x21-\x7e]'),
    CONSTRAINT outbox_idempotency_key_is_1_to_255_printable_ascii
        CHECK (octet_length(idempotency_key) BETWEEN 1 AND 255 AND idempotency_key !~ '[^\x20-\x7e]|^ | $'),
    CONSTRAINT outbox_ordering_key_is_1_to_255_printable_ascii
        CHECK (octet_length(ordering_key) BETWEEN 1 AND 255 AND ordering_key !~ '[^\x20-\x7e]|^ | $'),
    CONSTRAINT outbox_related_reference_is_1_to_255_printable_ascii
        CHECK (octet_length(related_reference) BETWEEN 1 AND 255 AND related_reference !~ '[^\x20-\x7e]|^ | $'),
    CONSTRAINT outbox_event_version_is_positive CHECK (event_version > 0),
    CONSTRAINT outbox_payload_is_at_most_1_mib CHECK (octet_length(payload::text) <= 1048576),
    CONSTRAINT outbox_headers_are_http_names_with_printable_string_values CHECK (
        headers = '{}'
        OR (jsonb_typeof(headers) = 'object'
            AND octet_length(headers::text) <= 8192
            AND NOT jsonb_path_exists(headers, '$.keyvalue() ? (!(@.key like_regex "^[-!#$%&''*+.^_`|~0-9A-Za-z]+$"))')
            AND NOT jsonb_path_exists(headers, 'strict $.* ? (@.type() != "string" || !(@ like_regex "^[\\x20-\\x7e]*$"))'))),
    -- Most drivers cannot scan an infinite timestamp, and RFC 3339 (headers, JSON) ends with year 9999 in whatever zone:
    -- one such row would stop a whole batch.
    CONSTRAINT outbox_available_at_is_in_years_1_to_9998
        CHECK (available_at >= '0001-01-01 00:00:00+00' AND available_at < '9999-01-01 00:00:00+00'),
    CONSTRAINT outbox_created_at_is_in_years_1_to_9998
        CHECK (created_at >= '0001-01-01 00:00:00+00' AND created_at < '9999-01-01 00:00:00+00')
);

COMMENT ON TABLE outbox IS 'Events, written once by producers inside their own transactions; deliveries are created by trigger.';

-- +goose StatementBegin
CREATE FUNCTION outbox_refuse_update() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'outbox: event % is immutable; insert a new event instead', OLD.id
        USING ERRCODE = 'integrity_constraint_violation';
END
$$;
-- +goose StatementEnd

CREATE TRIGGER outbox_is_immutable BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION outbox_refuse_update();

-- +goose Down
DROP TABLE outbox;
DROP FUNCTION outbox_refuse_update();
