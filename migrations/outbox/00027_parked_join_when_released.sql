-- What was parked and is not due until later joins the order of its key when it has its destinations, as any other
-- event that becomes due. It went before what had joined earlier.

-- +goose Up
-- +goose StatementBegin
DO $do$
DECLARE
    change record;
    definition text := pg_catalog.pg_get_functiondef('outbox_release_parked'::regproc);
BEGIN
    FOR change IN SELECT * FROM (VALUES
        ('p.next_attempt_at, p.ordering_key, p.payload_bytes', 'p.joined, p.next_attempt_at, p.ordering_key, p.payload_bytes'),
        ('CASE WHEN g.ordering_key IS NULL OR g.next_attempt_at <= now() THEN 0 END', 'g.joined')) c (was, becomes)
    LOOP
        IF pg_catalog.strpos(definition, change.was) = 0 THEN
            RAISE EXCEPTION 'outbox: the function outbox_release_parked is not that of the migrations';
        END IF;
        definition := pg_catalog.replace(definition, change.was, change.becomes);
    END LOOP;
    EXECUTE definition;
END
$do$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.replace(pg_catalog.replace(pg_catalog.pg_get_functiondef('outbox_release_parked'::regproc),
        'p.joined, p.next_attempt_at', 'p.next_attempt_at'),
        'g.joined', 'CASE WHEN g.ordering_key IS NULL OR g.next_attempt_at <= now() THEN 0 END');
END
$do$;
-- +goose StatementEnd
