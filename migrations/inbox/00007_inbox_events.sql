-- What an inbox works gets a table of its own, because a queue is changed and searched by state, and a memory is not: PostgreSQL
-- prepares every index of a table in every INSERT, and each event behind the middleware is one. The memory keeps one row for
-- each of them all the same, in the state 'recorded', so that an event which comes by both ways counts once.
--
-- The events of an inbox move, while nobody else may read or write. A program that is older than this one finds its columns gone
-- and fails, so that its senders try again: what it would still put into processed_events nobody would work.

-- +goose Up
LOCK TABLE processed_events IN ACCESS EXCLUSIVE MODE;

CREATE TABLE inbox_events (
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
    -- NULL: somebody has removed it, such as what is personal from what was processed. It cannot be replayed then.
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
    inbox_id          bigint           NOT NULL DEFAULT nextval('inbox_id_seq'),
    -- The fence: grows with every claim, stands in the WHERE of whatever a worker writes. A pending event without
    -- next_attempt_at waits for an earlier one of its ordering key.
    claim             bigint           NOT NULL DEFAULT 0,
    claimed_by        text,
    claimed_at        timestamptz,
    -- How often in a row its work was cut off before the handler had an outcome: its worker died, or the database was in
    -- the way. An event that kills its workers must not do so for ever.
    interruptions     integer          NOT NULL DEFAULT 0,
    CONSTRAINT inbox_events_pkey PRIMARY KEY (source, idempotency_key),
    CONSTRAINT inbox_events_state_is_known
        CHECK (processing_state IN ('pending', 'processing', 'succeeded', 'ignored', 'failed'))
);

COMMENT ON TABLE inbox_events IS 'Events that were recorded with their payload, and their state: the queue of an inbox.';

-- The hot one: what is due, by type.
CREATE INDEX inbox_events_due ON inbox_events (source, event_type, next_attempt_at, inbox_id)
    WHERE processing_state = 'pending' AND next_attempt_at IS NOT NULL;

-- What is being worked, for finding whose worker has died.
CREATE INDEX inbox_events_processing ON inbox_events (source, claimed_at)
    WHERE processing_state = 'processing';

-- At most one event of an ordering key is let go at a time, to be worked or to be tried again. The index is unique, so that
-- no mistake in a statement, of this package or of an operator, can break the order.
CREATE UNIQUE INDEX inbox_events_one_of_its_key ON inbox_events (source, ordering_key)
    WHERE ordering_key IS NOT NULL
      AND (processing_state = 'processing' OR processing_state = 'pending' AND next_attempt_at IS NOT NULL);

-- What waits behind it, in order; and what failed, and may keep those behind it waiting for an operator.
CREATE INDEX inbox_events_waiting ON inbox_events (source, ordering_key, sequence, inbox_id)
    WHERE processing_state = 'pending' AND next_attempt_at IS NULL;
CREATE INDEX inbox_events_failed_in_order ON inbox_events (source, ordering_key, sequence, inbox_id)
    WHERE processing_state = 'failed' AND ordering_key IS NOT NULL;

-- For replays by number, and for what waits for a person.
CREATE UNIQUE INDEX inbox_events_inbox_id ON inbox_events (inbox_id);
CREATE INDEX inbox_events_for_review ON inbox_events (source, inbox_id)
    WHERE processing_state IN ('failed', 'ignored');

INSERT INTO inbox_events (source, idempotency_key, event_type, event_version, related_reference, processing_state, received_at, processed_at, attempts,
    next_attempt_at, last_error, payload, request_headers, event_id, ordering_key, sequence, not_after, inbox_id, claim, claimed_by,
    claimed_at, interruptions)
SELECT source, idempotency_key, event_type, event_version, related_reference, processing_state, received_at, processed_at, attempts,
    next_attempt_at, last_error, payload, request_headers, event_id, ordering_key, sequence, not_after, inbox_id, claim, claimed_by,
    claimed_at, interruptions
FROM processed_events WHERE inbox_id IS NOT NULL;

UPDATE processed_events
SET processing_state = 'recorded', processed_at = NULL, attempts = 0, next_attempt_at = NULL, last_error = NULL, payload = NULL
WHERE inbox_id IS NOT NULL;

ALTER SEQUENCE inbox_id_seq OWNED BY inbox_events.inbox_id;

-- The indexes of the inbox go with the columns.
ALTER TABLE processed_events
    DROP COLUMN inbox_id,
    DROP COLUMN ordering_key,
    DROP COLUMN sequence,
    DROP COLUMN request_headers,
    DROP COLUMN claim,
    DROP COLUMN claimed_by,
    DROP COLUMN claimed_at,
    DROP COLUMN interruptions;

-- Whoever receives, or prunes, may do here what he may do to the memory, also where roles are not those of roles.sql; and in
-- inbox_freshness, which came without.
-- +goose StatementBegin
DO $$
DECLARE
    given record;
BEGIN
    FOR given IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END AS grantee,
               string_agg(DISTINCT a.privilege_type, ', ') AS privileges, bool_or(a.privilege_type = 'INSERT') AS records
        FROM pg_class c, aclexplode(c.relacl) a
        WHERE c.oid = 'processed_events'::regclass AND a.grantee <> c.relowner
          AND a.privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
        GROUP BY a.grantee HAVING bool_or(a.privilege_type IN ('INSERT', 'DELETE'))
    LOOP
        EXECUTE format('GRANT %s ON inbox_events, inbox_freshness TO %s', given.privileges, given.grantee);
        IF given.records THEN
            EXECUTE format('GRANT USAGE ON SEQUENCE inbox_id_seq TO %s', given.grantee);
        END IF;
    END LOOP;
END
$$;
-- +goose StatementEnd

-- +goose Down
LOCK TABLE processed_events, inbox_events IN ACCESS EXCLUSIVE MODE;

ALTER TABLE processed_events
    ADD COLUMN inbox_id        bigint,
    ADD COLUMN ordering_key    text COLLATE "C",
    ADD COLUMN sequence        bigint NOT NULL DEFAULT 0,
    ADD COLUMN request_headers jsonb,
    ADD COLUMN claim           bigint NOT NULL DEFAULT 0,
    ADD COLUMN claimed_by      text,
    ADD COLUMN claimed_at      timestamptz,
    ADD COLUMN interruptions   integer NOT NULL DEFAULT 0;

-- What is in the inbox while somebody has removed the memory of it is remembered again. What came again by another way since
-- has a row, and stays processed.
INSERT INTO processed_events (source, idempotency_key, payload_hash, event_type, event_version, related_reference, received_at, event_id,
    not_after, processing_state)
SELECT source, idempotency_key, sha256(payload), event_type, event_version, related_reference, received_at, event_id, not_after, 'recorded'
FROM inbox_events
ON CONFLICT ON CONSTRAINT processed_events_pkey DO NOTHING;

UPDATE processed_events p
SET processing_state = i.processing_state, processed_at = i.processed_at, attempts = i.attempts, next_attempt_at = i.next_attempt_at,
    last_error = i.last_error, payload = i.payload, inbox_id = i.inbox_id, ordering_key = i.ordering_key, sequence = i.sequence,
    request_headers = i.request_headers, claim = i.claim, claimed_by = i.claimed_by, claimed_at = i.claimed_at,
    interruptions = i.interruptions
FROM inbox_events i
WHERE p.processing_state = 'recorded' AND i.source = p.source AND i.idempotency_key = p.idempotency_key;
-- What somebody has removed from the inbox was processed, as far as anybody knows.
UPDATE processed_events SET processing_state = 'succeeded' WHERE processing_state = 'recorded';

ALTER SEQUENCE inbox_id_seq OWNED BY processed_events.inbox_id;
DROP TABLE inbox_events;

-- The hot one: what is due, by type.
CREATE INDEX processed_events_due ON processed_events (source, event_type, next_attempt_at, inbox_id)
    WHERE processing_state = 'pending' AND next_attempt_at IS NOT NULL;

-- What is being worked, for finding whose worker has died.
CREATE INDEX processed_events_processing ON processed_events (source, claimed_at)
    WHERE processing_state = 'processing';

-- At most one event of an ordering key is let go at a time, to be worked or to be tried again. The index is unique, so that
-- no mistake in a statement, of this package or of an operator, can break the order.
CREATE UNIQUE INDEX processed_events_one_of_its_key ON processed_events (source, ordering_key)
    WHERE ordering_key IS NOT NULL
      AND (processing_state = 'processing' OR processing_state = 'pending' AND next_attempt_at IS NOT NULL);

-- What waits behind it, in order; and what failed, and may keep those behind it waiting for an operator.
CREATE INDEX processed_events_waiting ON processed_events (source, ordering_key, sequence, inbox_id)
    WHERE processing_state = 'pending' AND next_attempt_at IS NULL;
CREATE INDEX processed_events_failed_in_order ON processed_events (source, ordering_key, sequence, inbox_id)
    WHERE processing_state = 'failed' AND ordering_key IS NOT NULL;

-- For replays by number, and for what waits for a person.
CREATE UNIQUE INDEX processed_events_inbox_id ON processed_events (inbox_id) WHERE inbox_id IS NOT NULL;
CREATE INDEX processed_events_for_review ON processed_events (source, inbox_id)
    WHERE processing_state IN ('failed', 'ignored') AND inbox_id IS NOT NULL;
