-- The receiver's memory: one row per event it has processed, written in the same transaction as the effect.

-- +goose Up
CREATE TABLE processed_events (
    -- Two receivers in one database that get the same events must not take each other's for duplicates.
    receiver          text COLLATE "C" NOT NULL,
    source            text COLLATE "C" NOT NULL,
    idempotency_key   text COLLATE "C" NOT NULL,
    -- Of the sender: a duplicate that names another one is none.
    destination       text COLLATE "C",
    event_type        text             NOT NULL DEFAULT '',
    event_version     integer          NOT NULL DEFAULT 1,
    event_id          bigint,
    related_reference text,
    -- succeeded, ignored, or recorded: inbox_events says what became of it. No CHECK here and below: PostgreSQL parses a table's
    -- again for every statement, and only the package consumer writes these rows.
    processing_state  text COLLATE "C" NOT NULL,
    -- SHA-256 of the body, to tell a duplicate from a reused key. NULL for events of a transport without bytes to compare.
    payload_hash      bytea,
    received_at       timestamptz      NOT NULL DEFAULT now(),
    processed_at      timestamptz,
    -- Until when the sender may send the event again.
    not_after         timestamptz,
    attempts          integer          NOT NULL DEFAULT 1,
    next_attempt_at   timestamptz,
    last_error        text,
    response_status   smallint,
    payload           bytea,
    CONSTRAINT processed_events_pkey PRIMARY KEY (receiver, source, idempotency_key)
);

COMMENT ON TABLE processed_events IS 'Events this receiver has processed, by sender and idempotency key: the memory that suppresses duplicates.';
COMMENT ON COLUMN processed_events.attempts IS '1, however often the sender sent the event: an attempt that failed leaves no row. 0: recorded, and inbox_events counts the attempts.';
COMMENT ON COLUMN processed_events.next_attempt_at IS 'Reserved, always NULL.';
COMMENT ON COLUMN processed_events.payload IS 'Reserved, always NULL: this table keeps no payloads.';

-- The row of an event is what keeps its effect from happening twice, so nothing that the event's own transaction does may remove
-- the row or make it another event's.
-- +goose StatementBegin
CREATE FUNCTION processed_events_keep() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'inbox: the event that is being processed keeps its row in processed_events'
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'Without the row the event would take effect again. Set what is personal in it to NULL instead.';
END
$$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION processed_events_keep() FROM PUBLIC;
-- received_at is when the transaction that inserted the row began. Not xmin: an UPDATE in a savepoint changes that.
CREATE TRIGGER processed_events_keep
    BEFORE DELETE OR UPDATE OF receiver, source, idempotency_key, received_at ON processed_events
    FOR EACH ROW WHEN (OLD.received_at = now()) EXECUTE FUNCTION processed_events_keep();
-- The setting is one that the package consumer makes in the transaction of an event.
CREATE TRIGGER processed_events_keep_all
    BEFORE TRUNCATE ON processed_events
    FOR EACH STATEMENT WHEN (coalesce(current_setting('outbox_relay.lock_timeout', true), '') <> '') EXECUTE FUNCTION processed_events_keep();
-- Also under session_replication_role = replica, with which a handler may load data.
ALTER TABLE processed_events ENABLE ALWAYS TRIGGER processed_events_keep, ENABLE ALWAYS TRIGGER processed_events_keep_all;

-- What the receiver may have forgotten, so that it refuses to guess.
CREATE TABLE inbox_forgotten (
    receiver         text COLLATE "C" NOT NULL,
    source           text COLLATE "C" NOT NULL,
    received_before  timestamptz      NOT NULL,
    -- Shortly before the present received_before was committed.
    announced_at     timestamptz      NOT NULL,
    -- What stood in received_before until then. Rows from before it may be removed at once; see inbox_prune.
    removable_before timestamptz      NOT NULL DEFAULT '-infinity',
    CONSTRAINT inbox_forgotten_pkey PRIMARY KEY (receiver, source),
    CONSTRAINT inbox_forgotten_keeps_the_last_day CHECK (received_before <= announced_at - interval '24 hours')
);

COMMENT ON TABLE inbox_forgotten IS 'By receiver and sender: rows of processed_events that were received before this moment may be gone. Events created before it that are not known are refused.';

-- The newest version of each entity that a receiver has applied, so that a late event does not undo a newer one. Two receivers in one
-- database may name the same entities, and must not take each other's versions for theirs.
--
-- A row outlives its entity: it is what keeps a late update from bringing a deleted one back. Delete rows only of
-- entities of which no event can come any more.
CREATE TABLE inbox_freshness (
    receiver   text COLLATE "C" NOT NULL DEFAULT '',
    scope      text COLLATE "C" NOT NULL,
    entity     text COLLATE "C" NOT NULL,
    -- A version is a number, or a time and what decides between equal times.
    sequence   bigint,
    at         timestamptz,
    tiebreak   bigint,
    updated_at timestamptz      NOT NULL DEFAULT now(),
    CONSTRAINT inbox_freshness_pkey PRIMARY KEY (receiver, scope, entity),
    CONSTRAINT inbox_freshness_scope_is_1_to_255_bytes CHECK (octet_length(scope) BETWEEN 1 AND 255),
    CONSTRAINT inbox_freshness_entity_is_1_to_255_bytes CHECK (octet_length(entity) BETWEEN 1 AND 255),
    -- Also what refuses to compare the one kind with the other.
    CONSTRAINT inbox_freshness_is_by_sequence_or_by_time
        CHECK ((sequence IS NULL) <> (at IS NULL) AND (at IS NULL) = (tiebreak IS NULL))
) WITH (fillfactor = 80); -- room for updates in place: no column of an index changes

COMMENT ON TABLE inbox_freshness IS 'The newest version of each entity that was applied: what comes with an older one is stale.';

-- Makes the settings of the session what the first event on this connection found, whatever a handler has changed since. It is called
-- in the first statement of each event, in which it may be rolled back: so is then what the handler changes. Settings that the
-- session had before, as a pool gives them to each connection, are kept in one more setting.
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

-- +goose Down
DROP FUNCTION inbox_reset();
DROP TABLE inbox_freshness;
DROP TABLE inbox_forgotten;
DROP TABLE processed_events;
DROP FUNCTION processed_events_keep();
