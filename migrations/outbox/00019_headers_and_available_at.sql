-- More header names and spellings that an event may not bring; and no event that waits for more than a year.

-- +goose Up
-- The list is that of internal/webhook, written by a test of that package. An event that is there already is delivered
-- without such a header.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION outbox_headers_are_fit(headers jsonb) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
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

-- An event of the year 9998 holds its ordering key until then. The bound may move with the clock, because the clock only
-- goes forward: what was accepted once is accepted again, so that dumps can be restored. Hours, because a day has 23 to 25
-- of them where the time zone of the session has summer time.
-- One constraint in place of another, because every insert pays for each.
ALTER TABLE outbox
    DROP CONSTRAINT outbox_available_at_is_in_years_1_to_9998,
    ADD CONSTRAINT outbox_available_at_is_in_year_1_to_366_days_ahead
        CHECK (available_at >= '0001-01-01 00:00:00+00' AND available_at <= now() + interval '8784 hours') NOT VALID;

-- +goose Down
ALTER TABLE outbox
    DROP CONSTRAINT outbox_available_at_is_in_year_1_to_366_days_ahead,
    ADD CONSTRAINT outbox_available_at_is_in_years_1_to_9998
        CHECK (available_at >= '0001-01-01 00:00:00+00' AND available_at < '9999-01-01 00:00:00+00') NOT VALID;
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION outbox_headers_are_fit(headers jsonb) RETURNS boolean LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $$
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
