-- Handlers and receivers keep apart what they share: a session's settings, and the freshness of entities.

-- +goose Up
-- Makes the settings of the session what the first event on this connection found, whatever a handler has changed since. It is called
-- in the first statement of each event, in which it may be rolled back: so is then what the handler changes. Settings that the
-- session had of its own before, as a pool gives them to each connection, are kept in one more setting.
--
-- It runs with the rights of its caller. Nothing in it is sought outside of pg_catalog.
-- +goose StatementBegin
CREATE FUNCTION inbox_reset() RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    own pg_catalog.text := pg_catalog.current_setting('outbox_relay.session', true);
BEGIN
    IF pg_catalog.length(own) OPERATOR(pg_catalog.>) 0 THEN
        RESET ALL;
        IF pg_catalog.length(own) OPERATOR(pg_catalog.>) 2 THEN
            PERFORM pg_catalog.set_config(s.key, s.value, false) FROM pg_catalog.json_each_text(own::pg_catalog.json) s;
        END IF;
    ELSE
        SELECT coalesce(pg_catalog.json_object_agg(s.name, s.setting)::pg_catalog.text, '{}') INTO own FROM pg_catalog.pg_settings s
        WHERE s.source OPERATOR(pg_catalog.=) 'session' AND s.name OPERATOR(pg_catalog.!~) '^(transaction_|outbox_relay\.)';
    END IF;
    RETURN pg_catalog.set_config('outbox_relay.session', own, false) IS NOT NULL;
END
$$;
-- +goose StatementEnd

-- Two receivers in one database may name the same entities, and must not take each other's versions for theirs.
ALTER TABLE inbox_freshness
    ADD COLUMN receiver text COLLATE "C" NOT NULL DEFAULT '',
    DROP CONSTRAINT inbox_freshness_pkey,
    ADD CONSTRAINT inbox_freshness_pkey PRIMARY KEY (receiver, scope, entity);

-- +goose Down
ALTER TABLE inbox_freshness
    DROP CONSTRAINT inbox_freshness_pkey,
    DROP COLUMN receiver,
    ADD CONSTRAINT inbox_freshness_pkey PRIMARY KEY (scope, entity);
DROP FUNCTION inbox_reset();
