-- From here on an insert makes no deliveries: relays take events, and write a delivery when its outcome is known.

-- +goose Up
-- The lock waits for the transactions that have inserted events, and lets none insert before the end of this one. So each event
-- has either its deliveries, or a transaction that is not visible in the first target. It is held for milliseconds. Who waits for it
-- is bounded as in every file: by lock_timeout, which outbox-relay migrate sets, and which stock goose gets from the URL.
LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE;
DROP TRIGGER outbox_fan_out ON outbox;
-- Above any row that an earlier switch left.
INSERT INTO outbox_range (seq, relay, fence, base, target, low, upto, more, oldest, ended_at)
SELECT coalesce(max(seq), 0) + 1, 0, 0, pg_current_snapshot(), pg_current_snapshot(), 0, 0, false, coalesce(max(seq), 0) + 1, now() FROM outbox_range;
-- Some servers let only superusers read the control file.
UPDATE outbox_intake SET recorded_at = now(),
    system_identifier = CASE WHEN has_function_privilege('pg_control_system()', 'EXECUTE') THEN (SELECT system_identifier FROM pg_control_system()) ELSE 0 END,
    timeline = CASE WHEN has_function_privilege('pg_control_checkpoint()', 'EXECUTE') THEN (SELECT timeline_id FROM pg_control_checkpoint()) ELSE 0 END;

-- An event that has deliveries may lack others until it is routed.
-- +goose StatementBegin
DO $do$
DECLARE
    change record;
    before text;
BEGIN
    FOR change IN SELECT * FROM (VALUES
        ('outbox_archive_batch', 's.deliveries > 0 AND s.all_settled', 's.deliveries > 0 AND s.all_settled AND %s.outbox_is_routed(e.id)'),
        ('outbox_create_deliveries', 'FILTER (WHERE NOT EXISTS (SELECT FROM %1$s.outbox_delivery d WHERE d.event_id = e.id))',
         'FILTER (WHERE NOT EXISTS (SELECT FROM %1$s.outbox_delivery d WHERE d.event_id = e.id) AND %1$s.outbox_is_routed(e.id))')) c (name, was, becomes)
    LOOP
        before := pg_catalog.pg_get_functiondef(change.name::regproc);
        change.was := pg_catalog.format(change.was, pg_catalog.quote_ident(pg_catalog.current_schema()));
        IF pg_catalog.strpos(before, change.was) = 0 THEN
            RAISE EXCEPTION 'outbox: the function % is not that of the migrations', change.name;
        END IF;
        EXECUTE pg_catalog.replace(before, change.was, pg_catalog.format(change.becomes, pg_catalog.quote_ident(pg_catalog.current_schema())));
    END LOOP;
END
$do$;
-- +goose StatementEnd

-- Relays of earlier versions would find no new events, and would take those that are in hand for lost.
CREATE OR REPLACE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 15';

-- +goose Down
CREATE OR REPLACE FUNCTION outbox_compatible_since() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 12';
-- +goose StatementBegin
DO $do$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['outbox_archive_batch', 'outbox_create_deliveries'] LOOP
        EXECUTE pg_catalog.replace(pg_catalog.pg_get_functiondef(name::regproc),
            pg_catalog.format(' AND %I.outbox_is_routed(e.id)', pg_catalog.current_schema()), '');
    END LOOP;
END
$do$;
-- +goose StatementEnd
LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE;
-- What was in hand, or not yet taken, becomes pending.
SELECT outbox_cover_events(coalesce(min(f.id) - 1, 9223372036854775807), 2147483647, pg_current_snapshot())
FROM (SELECT o.id FROM outbox o
      WHERE o.xid >= (SELECT pg_snapshot_xmin(base) FROM outbox_range ORDER BY ended_at IS NULL DESC, CASE WHEN ended_at IS NULL THEN seq ELSE -seq END LIMIT 1) AND o.xid > '2'
      OFFSET 0) f;
UPDATE outbox_range SET ended_at = now() WHERE ended_at IS NULL;
UPDATE outbox_intake SET system_identifier = 0, timeline = 0;
CREATE TRIGGER outbox_fan_out AFTER INSERT ON outbox
    REFERENCING NEW TABLE AS new_event FOR EACH STATEMENT EXECUTE FUNCTION outbox_fan_out();
