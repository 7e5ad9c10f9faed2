-- Role templates: least privilege for producers, relays, readers, receivers and their support. Not a migration: run it once, after the
-- migrations, with the schema first on the search_path, and grant the roles to your login roles. Run it as a superuser, or as the
-- owner of the tables, who must be allowed to create roles (CREATEROLE) unless these are there already:
--
--     psql -v ON_ERROR_STOP=1 -f migrations/roles.sql postgres://billing_owner@localhost:5432/billing
--     GRANT outbox_producer TO billing_app;
--
-- Run it again after an upgrade: it grants what a new version needs and revokes what it needs no longer. It does all or nothing,
-- and refuses a schema in which roles other than the owner may create objects: such an object can take the place of the one that
-- a statement means by an unqualified name, and then runs with the rights of others.
--
-- Roles belong to the whole server: outbox_producer may insert into each outbox for which this script was run, and outbox_relay may
-- claim there. Where applications that do not trust each other share a server, give the roles of each outbox a prefix. Set it at the
-- first run; later runs find it by the rights that they have granted.
--
--     PGOPTIONS='-c search_path=billing -c outbox_relay.role_prefix=billing_' psql -v ON_ERROR_STOP=1 -f migrations/roles.sql …
--     GRANT billing_outbox_producer TO billing_app;

DO $$
DECLARE
    -- Everything is qualified up to the point where only pg_catalog is searched: a superuser may run this.
    former   text := pg_catalog.current_setting('search_path');
    schema   name := pg_catalog.current_schema();
    outbox   oid;
    inbox    oid;
    tables   record;
    others   text;
    role     text;
    part     text;
    prefix   text := pg_catalog.current_setting('outbox_relay.role_prefix', true);
    grants   text := '';
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    IF schema IS NULL THEN
        RAISE EXCEPTION 'search_path (%) names no schema that is there and that % may use', former, current_user;
    END IF;
    outbox := to_regclass(format('%I.outbox', schema));
    inbox := to_regclass(format('%I.processed_events', schema));
    IF outbox IS NULL AND inbox IS NULL THEN
        RAISE EXCEPTION 'schema % has no tables to grant rights on', schema
            USING HINT = 'Migrate first. If the tables are in another schema, have it first on the search_path: PGOPTIONS=''-c search_path=NAME'' psql …';
    END IF;
    SELECT t.relname, t.relowner, quote_ident(pg_get_userbyid(t.relowner)) AS owner,
           n.nspowner, -- from version 15 on, public belongs to pg_database_owner
           quote_ident(pg_get_userbyid(CASE WHEN o.rolname = 'pg_database_owner' THEN d.datdba ELSE n.nspowner END)) AS schema_owner
    INTO tables
    FROM pg_class t JOIN pg_namespace n ON n.oid = t.relnamespace JOIN pg_roles o ON o.oid = n.nspowner
    JOIN pg_database d ON d.datname = current_database()
    WHERE t.oid IN (outbox, inbox) ORDER BY pg_has_role(t.relowner, 'USAGE'), t.oid = outbox DESC LIMIT 1;
    -- To a role that has a right without being allowed to grant it, GRANT only gives a warning.
    IF NOT pg_has_role(tables.relowner, 'USAGE') THEN
        RAISE EXCEPTION '% may not grant rights on %: run this as its owner, %, or as a superuser', current_user, tables.relname, tables.owner;
    END IF;
    -- The same question as selectSchemaCreators in internal/pg/store_schema.go.
    SELECT string_agg(g.grantee, ', ' ORDER BY g.grantee) INTO others
    FROM (SELECT DISTINCT coalesce(quote_ident(r.rolname), 'PUBLIC') AS grantee
          FROM pg_namespace n CROSS JOIN LATERAL aclexplode(n.nspacl) a LEFT JOIN pg_roles r ON r.oid = a.grantee
          WHERE n.nspname = schema AND a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner AND r.rolsuper IS NOT TRUE
            AND NOT EXISTS (SELECT FROM pg_class t WHERE t.oid IN (outbox, inbox) AND t.relowner = a.grantee)) g;
    IF others IS NOT NULL THEN
        RAISE EXCEPTION 'in schema % others may create functions that run with the rights of its users: %', schema, others
            USING HINT = format('Run this first, as %s or a superuser: REVOKE CREATE ON SCHEMA %I FROM %s; GRANT CREATE ON SCHEMA %2$I TO %4$s;',
                                tables.schema_owner, schema, others, tables.owner);
    END IF;
    IF outbox IS NOT NULL AND NOT has_schema_privilege(tables.relowner, schema, 'CREATE') THEN
        RAISE WARNING '% may not create tables in schema %: nothing will be archived', tables.owner, schema
            USING HINT = format('Run this, as %s or a superuser: GRANT CREATE ON SCHEMA %I TO %s;', tables.schema_owner, schema, tables.owner);
    END IF;

    prefix := coalesce(nullif(prefix, ''), (
        SELECT min(substring(r.rolname::text FROM '^(.*)(?:outbox_relay|inbox_receiver)$'))
        FROM pg_class t CROSS JOIN LATERAL aclexplode(t.relacl) a JOIN pg_roles r ON r.oid = a.grantee WHERE t.oid IN (outbox, inbox)), '');
    IF prefix !~ '^([a-z][a-z0-9_]{0,29})?$' THEN
        RAISE EXCEPTION 'the prefix of roles may be up to 30 of a to z, 0 to 9 and _, and starts with a letter: not %', prefix;
    END IF;
    FOREACH role IN ARRAY ARRAY ['outbox_producer', 'outbox_relay', 'outbox_reader', 'outbox_support', 'inbox_receiver', 'inbox_support'] LOOP
        role := prefix || role;
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role) THEN
            IF NOT (SELECT rolcreaterole OR rolsuper FROM pg_roles WHERE rolname = current_user) THEN
                RAISE EXCEPTION '% may not create the role %', current_user, role
                    USING HINT = format('Run this script as a superuser, or first: ALTER ROLE %I CREATEROLE;', current_user);
            END IF;
            EXECUTE format('CREATE ROLE %I NOLOGIN', role);
        END IF;
        IF pg_has_role(tables.nspowner, 'USAGE') THEN
            EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', schema, role);
        ELSIF NOT has_schema_privilege(role, schema, 'USAGE') THEN
            RAISE EXCEPTION '% may not grant rights on schema %', current_user, schema
                USING HINT = format('Run this script as %s or a superuser.', tables.schema_owner);
        END IF;
    END LOOP;

    -- With a type of these tables anybody could make a column, also of a temporary table, and migrations may not alter a table whose type
    -- has one.
    FOR part IN SELECT t.typname FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
                WHERE n.nspname = schema AND t.typowner = tables.relowner AND t.typcategory <> 'A'
                  AND (starts_with(t.typname::text, 'outbox') OR starts_with(t.typname::text, 'inbox_') OR t.typname = 'processed_events') LOOP
        EXECUTE format('REVOKE USAGE ON TYPE %I.%I FROM PUBLIC', schema, part);
    END LOOP;

    -- The login of a receiver with inbox_receiver reaches the rows of all receivers here. Receivers that do not trust each other have a
    -- login each, with a role inbox_receiver_NAME instead, where NAME is the receiver's (Config.Receiver, at most 48 bytes). Create
    -- these roles before you run this script: each is then held to the rows of its own receiver. It may lock the tables all the same.
    IF inbox IS NOT NULL AND EXISTS (SELECT FROM pg_roles WHERE starts_with(rolname::text, prefix || 'inbox_receiver_')) THEN
        FOREACH part IN ARRAY ARRAY ['processed_events', 'inbox_events', 'inbox_freshness', 'inbox_forgotten'] LOOP
            EXECUTE format('ALTER TABLE %I.%I ENABLE ROW LEVEL SECURITY', schema, part);
            FOR role IN SELECT rolname FROM pg_roles WHERE starts_with(rolname::text, prefix || 'inbox_receiver') OR rolname = prefix || 'inbox_support' LOOP
                EXECUTE format('DROP POLICY IF EXISTS %I ON %I.%I', role, schema, part);
                IF role IN (prefix || 'inbox_receiver', prefix || 'inbox_support') THEN
                    EXECUTE format('CREATE POLICY %I ON %I.%I TO %1$I USING (true)', role, schema, part);
                ELSE
                    EXECUTE format('CREATE POLICY %I ON %I.%I TO %1$I USING (receiver = %4$L)', role, schema, part, substr(role, length(prefix) + 16));
                    EXECUTE format('GRANT SELECT, INSERT, UPDATE%s ON %I.%I TO %I', CASE WHEN part <> 'inbox_forgotten' THEN ', DELETE' END, schema, part, role);
                    EXECUTE format('GRANT USAGE ON SEQUENCE %I.inbox_id_seq TO %I', schema, role);
                    EXECUTE format('GRANT SELECT ON %I.inbox_schema_version TO %I', schema, role);
                    IF pg_has_role(tables.nspowner, 'USAGE') THEN
                        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', schema, role);
                    END IF;
                END IF;
            END LOOP;
        END LOOP;
    END IF;

    IF outbox IS NOT NULL THEN
        grants := grants || $grants$
        -- A producer may insert events, nothing else, and chooses neither their ids nor when they were created. By the function the Go
        -- package's Enqueue distinguishes duplicates from reused keys.
        REVOKE INSERT ON outbox FROM outbox_producer; -- of all columns, if it was ever granted
        GRANT INSERT (event_type, event_version, payload, idempotency_key, ordering_key, related_reference, headers, available_at)
            ON outbox TO outbox_producer;
        GRANT EXECUTE ON FUNCTION outbox_compare_events(text[], integer[], json[], text[], text[], text[], jsonb[]) TO outbox_producer;
        -- The default of a column runs with the producer's rights. PUBLIC has these, until somebody takes them or restores a dump
        -- without rights.
        GRANT SELECT ON SEQUENCE outbox_armed TO outbox_producer;
        GRANT EXECUTE ON FUNCTION outbox_wake() TO outbox_producer;

        -- A relay reads events but can neither write nor alter one; state lives in the other tables. It makes deliveries and changes
        -- their state. Removing anything that says what happened to an event is left to functions.
        REVOKE ALL ON outbox_delivery, outbox_attempt, outbox_route, outbox_destination FROM outbox_relay; -- whatever was ever granted
        GRANT SELECT ON outbox, outbox_schema_version, outbox_delivery TO outbox_relay;
        GRANT UPDATE (status, attempts, claim, claimed_by, lease_expires_at, next_attempt_at, last_attempt_at, delivered_at,
                      last_http_status, last_reason, last_error, rescues, replay, not_after, blocked_by, joined)
            ON outbox_delivery TO outbox_relay;
        GRANT INSERT (event_id, claim, next_attempt_at, lease_expires_at, last_attempt_at, delivered_at, not_after, claimed_by, attempts,
                      payload_bytes, last_http_status, destination, status, ordering_key, last_reason, last_error, blocked_by, rescues, joined)
            ON outbox_delivery TO outbox_relay;
        GRANT SELECT, INSERT, DELETE, UPDATE (relay_id, fence, ended_at) ON outbox_range TO outbox_relay;
        GRANT SELECT, UPDATE (system_identifier, timeline, recorded_at) ON outbox_intake TO outbox_relay;
        GRANT SELECT ON outbox_range, outbox_intake TO outbox_reader;
        GRANT SELECT, INSERT ON outbox_attempt TO outbox_relay;
        GRANT SELECT, INSERT, DELETE ON outbox_route TO outbox_relay;
        GRANT SELECT, INSERT, UPDATE ON outbox_destination, outbox_identity TO outbox_relay;
        GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_relay, outbox_alert TO outbox_relay;
        GRANT SELECT ON outbox_identity TO outbox_reader;
        GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_alert_notice, outbox_alert_silence, outbox_rescue, outbox_void, outbox_history TO outbox_relay;
        GRANT SELECT, INSERT, DELETE ON outbox_alert_past TO outbox_relay;
        GRANT SELECT ON outbox_alert_past, outbox_history TO outbox_reader;
        GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_relay_destination, outbox_relay_route TO outbox_relay;
        GRANT SELECT ON outbox_relay_destination, outbox_relay_route TO outbox_reader;
        GRANT SELECT, UPDATE ON SEQUENCE outbox_armed TO outbox_relay;
        GRANT SELECT, UPDATE ON outbox_watch, outbox_undelivered TO outbox_relay;
        GRANT SELECT ON outbox_alert_notice, outbox_alert_silence, outbox_rescue, outbox_void, outbox_watch, outbox_undelivered TO outbox_reader;
        -- Operators work with the rights of a relay. They add to the audit and carry a bulk operation on; they rewrite nothing else.
        REVOKE ALL ON outbox_audit FROM outbox_relay;
        -- When an entry was written is not theirs to say.
        GRANT SELECT, INSERT (event_id, matched, done, actor, origin, action, state, destination, selection, detail),
            UPDATE (updated_at, done, state, detail) ON outbox_audit TO outbox_relay;
        GRANT SELECT ON outbox_audit TO outbox_reader;
        -- To name the session that holds back vacuum, whichever role it belongs to, a relay has to see the sessions of other
        -- roles. Only a superuser can allow that, and it shows the text of their statements, too; hence it is left to you:
        --     GRANT pg_read_all_stats TO outbox_relay;

        -- Readers see neither payloads nor headers, which may hold what concerns people, or secrets.
        REVOKE SELECT ON outbox, outbox_archive FROM outbox_reader; -- of all columns, if it was ever granted
        GRANT SELECT (id, event_type, event_version, idempotency_key, ordering_key, related_reference, available_at, created_at, xid)
            ON outbox TO outbox_reader;
        GRANT SELECT (id, event_type, event_version, idempotency_key, ordering_key, related_reference, available_at, created_at, archived_at, deliveries)
            ON outbox_archive TO outbox_reader;
        GRANT SELECT
            ON outbox_schema_version, outbox_delivery, outbox_route, outbox_destination, outbox_attempt, outbox_relay, outbox_alert
            TO outbox_reader;
        GRANT EXECUTE ON FUNCTION outbox_outline(bigint) TO outbox_relay, outbox_reader;
        -- Support also reveals the content of single events; each is in the audit before. Grant outbox_reader beside it.
        GRANT EXECUTE ON FUNCTION outbox_order_reveal(bigint, text, text), outbox_reveal(bigint) TO outbox_relay, outbox_support;
        -- Removing events is left to functions that see for themselves what is settled, or old enough.
        GRANT SELECT ON outbox_archive TO outbox_relay;
        GRANT EXECUTE ON FUNCTION outbox_archive_batch(bigint, integer, interval, boolean),
            outbox_drop_archive(interval, boolean, text), outbox_prune_attempts(bigint, integer, interval, boolean),
            outbox_prune_processed_events(bigint, integer, interval, boolean), outbox_create_deliveries(bigint, integer),
            outbox_release_parked(bigint, bigint), outbox_cover_events(bigint, integer, pg_snapshot)
            TO outbox_relay;
        GRANT EXECUTE ON FUNCTION outbox_is_routed(bigint) TO outbox_relay, outbox_reader;
        -- A dump that was restored without rights gave them to all.
        REVOKE EXECUTE ON FUNCTION outbox_compare_events(text[], integer[], json[], text[], text[], text[], jsonb[]), outbox_outline(bigint),
            outbox_order_reveal(bigint, text, text), outbox_reveal(bigint), outbox_archive_batch(bigint, integer, interval, boolean),
            outbox_drop_archive(interval, boolean, text), outbox_prune_attempts(bigint, integer, interval, boolean),
            outbox_prune_processed_events(bigint, integer, interval, boolean), outbox_create_deliveries(bigint, integer),
            outbox_release_parked(bigint, bigint), outbox_cover_events(bigint, integer, pg_snapshot), outbox_is_routed(bigint) FROM PUBLIC;
        $grants$;
    END IF;

    IF inbox IS NOT NULL THEN
        grants := grants || $grants$
        GRANT SELECT, INSERT, UPDATE, DELETE ON processed_events TO inbox_receiver;
        GRANT SELECT, INSERT, UPDATE, DELETE ON inbox_events TO inbox_receiver;
        GRANT USAGE ON SEQUENCE inbox_id_seq TO inbox_receiver;
        GRANT SELECT, INSERT, UPDATE, DELETE ON inbox_freshness TO inbox_receiver;
        GRANT SELECT, INSERT, UPDATE ON inbox_forgotten TO inbox_receiver;
        GRANT SELECT ON inbox_schema_version TO inbox_receiver, inbox_support;

        -- Support looks at events, replays and ignores them (outbox-relay inbox), without their payloads and the headers of
        -- their requests. It changes nothing but their state, and neither adds nor removes any.
        GRANT SELECT (receiver, source, idempotency_key, event_type, event_version, related_reference, processing_state, received_at,
                      processed_at, attempts, next_attempt_at, last_error, event_id, ordering_key, sequence, not_after, inbox_id,
                      claim, claimed_by, claimed_at, interruptions)
            ON inbox_events TO inbox_support;
        GRANT UPDATE (processing_state, attempts, interruptions, processed_at, next_attempt_at) ON inbox_events TO inbox_support;
        -- ctid: outbox-relay reconcile reads the table by its pages.
        GRANT SELECT (receiver, source, idempotency_key, event_type, event_version, related_reference, processing_state, received_at,
                      processed_at, last_error, event_id, not_after, response_status, destination, ctid)
            ON processed_events TO inbox_support;
        GRANT SELECT ON inbox_forgotten TO inbox_support;
        GRANT EXECUTE ON FUNCTION inbox_has_payload(bigint) TO inbox_receiver, inbox_support;
        REVOKE EXECUTE ON FUNCTION inbox_has_payload(bigint) FROM PUBLIC;
        $grants$;
    END IF;
    -- The names that end a statement are roles.
    grants := regexp_replace(grants, '\m((outbox|inbox)_(producer|relay|reader|support|receiver))\M(?=[a-z_, ]*;)', prefix || '\1', 'g');
    -- From here on there are no expressions, only names of tables and signatures of functions.
    PERFORM set_config('search_path', format('pg_catalog, %I, pg_temp', schema), true);
    EXECUTE grants;
    PERFORM pg_catalog.set_config('search_path', former, true);
    PERFORM pg_catalog.set_config('outbox_relay.role_prefix', prefix, true); -- for who runs this in a transaction
END
$$;
