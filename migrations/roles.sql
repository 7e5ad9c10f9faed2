-- Role templates: least privilege for producers, relays, receivers and readers. Not a migration: run it once, after the
-- migrations, with the schema first on the search_path, and grant the roles to your login roles. Run it as a superuser, or as the
-- owner of the tables, who must be allowed to create roles (CREATEROLE) unless these are there already:
--
--     psql -v ON_ERROR_STOP=1 -f migrations/roles.sql postgres://billing_owner@localhost:5432/billing
--     GRANT outbox_producer TO billing_app;
--
-- It may be run again; what already exists stays. It does all or nothing.

DO $$
DECLARE
    name  text;
    owned record;
BEGIN
    -- To whoever has a right without being allowed to grant it, GRANT only gives a warning.
    FOR owned IN
        SELECT relname, pg_get_userbyid(relowner) AS owner FROM pg_class
        WHERE oid IN (to_regclass('outbox'), to_regclass('processed_events')) AND NOT pg_has_role(relowner, 'USAGE')
    LOOP
        RAISE EXCEPTION '% may not grant rights on %: run this as its owner, %, or as a superuser', current_user, owned.relname, owned.owner;
    END LOOP;
    IF to_regclass('outbox') IS NULL AND to_regclass('processed_events') IS NULL THEN
        RAISE EXCEPTION 'schema % has no tables to grant rights on: migrate first, and have the schema first on the search_path', current_schema();
    END IF;

    FOREACH name IN ARRAY ARRAY ['outbox_producer', 'outbox_relay', 'outbox_reader', 'inbox_receiver'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', name);
        END IF;
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', current_schema(), name);
    END LOOP;

    IF to_regclass('outbox') IS NOT NULL THEN
        -- A producer may insert events, nothing else. The Go package's Enqueue also tells duplicates from reused keys,
        -- for which it reads the event that holds the key: grant outbox_reader beside this one for that.
        GRANT INSERT ON outbox TO outbox_producer;
        GRANT EXECUTE ON FUNCTION outbox_headers_are_fit(jsonb) TO outbox_producer; -- of a constraint

        -- A relay reads events but can neither write nor alter one; state lives in the other tables.
        GRANT SELECT ON outbox, outbox_schema_version TO outbox_relay;
        GRANT SELECT, INSERT, UPDATE, DELETE
            ON outbox_delivery, outbox_route, outbox_destination, outbox_attempt, outbox_relay, outbox_alert
            TO outbox_relay;
        GRANT SELECT, INSERT, UPDATE ON outbox_identity TO outbox_relay;
        GRANT SELECT ON outbox_identity TO outbox_reader;
        GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_alert_notice, outbox_rescue, outbox_void TO outbox_relay;
        GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_relay_destination, outbox_relay_route TO outbox_relay;
        GRANT SELECT ON outbox_relay_destination, outbox_relay_route TO outbox_reader;
        GRANT SELECT, UPDATE ON SEQUENCE outbox_armed TO outbox_relay;
        GRANT SELECT, UPDATE ON outbox_watch, outbox_undelivered TO outbox_relay;
        GRANT SELECT ON outbox_alert_notice, outbox_rescue, outbox_void, outbox_watch, outbox_undelivered TO outbox_reader;
        -- To name the session that holds back vacuum, whoever it belongs to, a relay has to see the sessions of other
        -- roles. Only a superuser can allow that, and it shows the text of their statements, too; hence it is left to you:
        --     GRANT pg_read_all_stats TO outbox_relay;

        GRANT SELECT
            ON outbox, outbox_schema_version, outbox_delivery, outbox_route, outbox_destination, outbox_attempt,
               outbox_relay, outbox_alert
            TO outbox_reader;
        -- Removing events is left to functions that see for themselves what is settled, or old enough.
        GRANT SELECT ON outbox_archive TO outbox_relay, outbox_reader;
        GRANT EXECUTE ON FUNCTION outbox_archive_batch(bigint, integer, interval, boolean),
            outbox_drop_archive(interval, boolean, text), outbox_prune_attempts(bigint, integer, interval, boolean),
            outbox_prune_processed_events(bigint, integer, interval, boolean), outbox_create_deliveries(bigint, integer)
            TO outbox_relay;
    END IF;

    IF to_regclass('processed_events') IS NOT NULL THEN
        GRANT SELECT, INSERT, UPDATE, DELETE ON processed_events TO inbox_receiver;
        GRANT SELECT, INSERT, UPDATE, DELETE ON inbox_events TO inbox_receiver;
        GRANT USAGE ON SEQUENCE inbox_id_seq TO inbox_receiver;
        GRANT SELECT, INSERT, UPDATE, DELETE ON inbox_freshness TO inbox_receiver;
        GRANT SELECT, INSERT, UPDATE ON inbox_forgotten TO inbox_receiver;
    END IF;
END
$$;
