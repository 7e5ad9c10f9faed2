-- The event: written once, inside the producer's own transaction, and never updated.
-- Names are unqualified: the schema is the first one on the connection's search_path.

-- +goose Up
-- Each month becomes a partition of the archive, and most drivers cannot scan an infinite time. A domain, because PostgreSQL
-- parses the CHECKs of a table anew for every statement, some 8 us each. The other rules are kept by outbox_fan_out.
CREATE DOMAIN outbox_created_at AS timestamptz
    CONSTRAINT outbox_created_at_is_in_years_2000_to_9998
    CHECK (value >= '2000-01-01 00:00:00+00' AND value < '9999-01-01 00:00:00+00');

CREATE TABLE outbox (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_type        text COLLATE "C"  NOT NULL,
    event_version     integer           NOT NULL DEFAULT 1,
    -- json, not jsonb: the receiver gets the very bytes the producer wrote (jsonb reorders keys, drops
    -- duplicates, rewrites 1e3 as 1000 and refuses \u0000).
    payload           json              NOT NULL,
    idempotency_key   text COLLATE "C"  NOT NULL,
    ordering_key      text COLLATE "C",
    related_reference text,
    headers           jsonb             NOT NULL DEFAULT '{}',
    available_at      timestamptz       NOT NULL DEFAULT now(),
    created_at        outbox_created_at NOT NULL DEFAULT now(),
    CONSTRAINT outbox_idempotency_key_is_unique UNIQUE (idempotency_key)
) WITH (
    -- Events come and go: vacuum after a twentieth of them, not after a fifth.
    autovacuum_vacuum_scale_factor = 0.05,
    toast.autovacuum_vacuum_scale_factor = 0.05
);

COMMENT ON TABLE outbox IS 'Events, written once by producers inside their own transactions; deliveries are created by trigger.';

-- +goose StatementBegin
CREATE FUNCTION outbox_refuse_update() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'outbox: event % is immutable; insert a new event instead', OLD.id
        USING ERRCODE = 'integrity_constraint_violation';
END
$$;
-- +goose StatementEnd

CREATE TRIGGER outbox_is_immutable BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION outbox_refuse_update();

-- +goose StatementBegin
-- Header names and values that an event may bring. The list of names is that of internal/webhook, written by a test of that package.
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

-- A later migration that programs of an earlier version cannot work with replaces this function; one that only adds
-- leaves it as it is.
CREATE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 4';
COMMENT ON FUNCTION outbox_compatible_since() IS 'The oldest schema version whose programs work with this schema.';

-- +goose Down
DROP FUNCTION outbox_compatible_since();
DROP TABLE outbox;
DROP FUNCTION outbox_headers_are_fit(jsonb);
DROP FUNCTION outbox_refuse_update();
DROP DOMAIN outbox_created_at;
-- Made by 00013, whose Down leaves them to prepared statements of producers. Without the table there are none.
DROP DOMAIN IF EXISTS outbox_idempotency_key, outbox_event_type;
