-- What an inbox works. It is a table of its own, because a queue is changed and searched by state, and a memory is not: PostgreSQL
-- prepares every index of a table in every INSERT, and each event behind the middleware is one. The memory keeps one row for
-- each of them all the same, in the state 'recorded', so that an event which comes by both ways counts once.

-- +goose Up
CREATE SEQUENCE inbox_id_seq AS bigint;

CREATE TABLE inbox_events (
    receiver          text COLLATE "C" NOT NULL,
    source            text COLLATE "C" NOT NULL,
    idempotency_key   text COLLATE "C" NOT NULL,
    event_type        text             NOT NULL DEFAULT '',
    event_version     integer          NOT NULL DEFAULT 1,
    related_reference text,
    processing_state  text COLLATE "C" NOT NULL,
    received_at       timestamptz      NOT NULL DEFAULT now(),
    processed_at      timestamptz,
    attempts          integer          NOT NULL DEFAULT 0,
    next_attempt_at   timestamptz,
    last_error        text,
    -- NULL: it was removed, such as what is personal from what was processed. The event cannot be replayed then.
    payload           bytea,
    -- The verified headers of the request, of which a worker makes the event again.
    request_headers   jsonb,
    -- What the sender says: the event's id in its outbox, its place among the events of one ordering key, and until when
    -- it may send the event again.
    event_id          bigint,
    ordering_key      text COLLATE "C",
    sequence          bigint           NOT NULL DEFAULT 0,
    not_after         timestamptz,
    -- Grows with recording.
    inbox_id          bigint           NOT NULL DEFAULT pg_catalog.nextval('inbox_id_seq'),
    -- The fence: grows with every claim, stands in the WHERE of whatever a worker writes. A pending event without
    -- next_attempt_at waits for an earlier one of its ordering key.
    claim             bigint           NOT NULL DEFAULT 0,
    claimed_by        text,
    claimed_at        timestamptz,
    -- How often in a row its work was cut off before the handler had an outcome: its worker died, or the database was in
    -- the way. An event that kills its workers must not do so for ever.
    interruptions     integer          NOT NULL DEFAULT 0,
    -- The key first: without statistics the planner would take the primary key for the way to what is due of a sender.
    CONSTRAINT inbox_events_pkey PRIMARY KEY (idempotency_key, receiver, source),
    CONSTRAINT inbox_events_state_is_known
        CHECK (processing_state IN ('pending', 'processing', 'succeeded', 'ignored', 'failed'))
);

ALTER SEQUENCE inbox_id_seq OWNED BY inbox_events.inbox_id;
COMMENT ON TABLE inbox_events IS 'Events that were recorded with their payload, and their state: the queue of an inbox.';

-- The hot one: what is due, by type.
CREATE INDEX inbox_events_due ON inbox_events (receiver, source, event_type, next_attempt_at, inbox_id)
    WHERE processing_state = 'pending' AND next_attempt_at IS NOT NULL;

-- What is being worked, for finding whose worker has died.
CREATE INDEX inbox_events_processing ON inbox_events (receiver, source, claimed_at)
    WHERE processing_state = 'processing';

-- At most one event of an ordering key is let go at a time, to be worked or to be tried again. The index is unique, so that
-- no mistake in a statement, of this package or of an operator, can break the order.
CREATE UNIQUE INDEX inbox_events_one_of_its_key ON inbox_events (receiver, source, ordering_key)
    WHERE ordering_key IS NOT NULL
      AND (processing_state = 'processing' OR processing_state = 'pending' AND next_attempt_at IS NOT NULL);

-- What waits behind it, in order; and what failed, and may keep those behind it waiting for an operator.
CREATE INDEX inbox_events_waiting ON inbox_events (receiver, source, ordering_key, sequence, inbox_id)
    WHERE processing_state = 'pending' AND next_attempt_at IS NULL;
CREATE INDEX inbox_events_failed_in_order ON inbox_events (receiver, source, ordering_key, sequence, inbox_id)
    WHERE processing_state = 'failed' AND ordering_key IS NOT NULL;

-- For replays by number, and for what waits for a person.
CREATE UNIQUE INDEX inbox_events_inbox_id ON inbox_events (inbox_id);
CREATE INDEX inbox_events_for_review ON inbox_events (receiver, source, inbox_id)
    WHERE processing_state IN ('failed', 'ignored');

-- Reports whether an event of an inbox still has its payload; NULL: there is no such event. It runs with the rights of the
-- tables' owner: only a role with SELECT on the column could ask otherwise, and support must not read payloads.
-- Only pg_catalog is searched for names, and the table is qualified with the schema that this migration runs in.
-- +goose StatementBegin
DO $do$
BEGIN
    EXECUTE pg_catalog.format($sql$
CREATE FUNCTION %1$I.inbox_has_payload(id bigint) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS
$$ SELECT e.payload IS NOT NULL FROM %1$I.inbox_events e WHERE e.inbox_id = $1 $$;
REVOKE EXECUTE ON FUNCTION %1$I.inbox_has_payload(bigint) FROM PUBLIC;
    $sql$, pg_catalog.current_schema());
END
$do$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION inbox_has_payload(bigint);
DROP TABLE inbox_events;
