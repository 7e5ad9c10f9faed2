-- The indexes of the inbox mode hold its events only: whoever uses the middleware alone pays nothing for them. They are
-- made without keeping receivers waiting; a build that was interrupted leaves an invalid index, hence the drops.

-- +goose NO TRANSACTION
-- +goose Up
-- The hot one: what is due, by type.
DROP INDEX CONCURRENTLY IF EXISTS processed_events_due;
CREATE INDEX CONCURRENTLY processed_events_due ON processed_events (source, event_type, next_attempt_at, inbox_id)
    WHERE processing_state = 'pending' AND next_attempt_at IS NOT NULL;

-- What is being worked, for finding whose worker has died.
DROP INDEX CONCURRENTLY IF EXISTS processed_events_processing;
CREATE INDEX CONCURRENTLY processed_events_processing ON processed_events (source, claimed_at)
    WHERE processing_state = 'processing';

-- At most one event of an ordering key is let go at a time, to be worked or to be tried again. The index is unique, so that
-- no mistake in a statement, of this package or of an operator, can break the order.
DROP INDEX CONCURRENTLY IF EXISTS processed_events_one_of_its_key;
CREATE UNIQUE INDEX CONCURRENTLY processed_events_one_of_its_key ON processed_events (source, ordering_key)
    WHERE ordering_key IS NOT NULL
      AND (processing_state = 'processing' OR processing_state = 'pending' AND next_attempt_at IS NOT NULL);

-- What waits behind it, in order; and what failed, and may keep those behind it waiting for an operator.
DROP INDEX CONCURRENTLY IF EXISTS processed_events_waiting;
CREATE INDEX CONCURRENTLY processed_events_waiting ON processed_events (source, ordering_key, sequence, inbox_id)
    WHERE processing_state = 'pending' AND next_attempt_at IS NULL;
DROP INDEX CONCURRENTLY IF EXISTS processed_events_failed_in_order;
CREATE INDEX CONCURRENTLY processed_events_failed_in_order ON processed_events (source, ordering_key, sequence, inbox_id)
    WHERE processing_state = 'failed' AND ordering_key IS NOT NULL;

-- For replays by number, and for what waits for a person.
DROP INDEX CONCURRENTLY IF EXISTS processed_events_inbox_id;
CREATE UNIQUE INDEX CONCURRENTLY processed_events_inbox_id ON processed_events (inbox_id) WHERE inbox_id IS NOT NULL;
DROP INDEX CONCURRENTLY IF EXISTS processed_events_for_review;
CREATE INDEX CONCURRENTLY processed_events_for_review ON processed_events (source, inbox_id)
    WHERE processing_state IN ('failed', 'ignored') AND inbox_id IS NOT NULL;

-- +goose Down
DROP INDEX CONCURRENTLY IF EXISTS processed_events_for_review;
DROP INDEX CONCURRENTLY IF EXISTS processed_events_inbox_id;
DROP INDEX CONCURRENTLY IF EXISTS processed_events_failed_in_order;
DROP INDEX CONCURRENTLY IF EXISTS processed_events_waiting;
DROP INDEX CONCURRENTLY IF EXISTS processed_events_one_of_its_key;
DROP INDEX CONCURRENTLY IF EXISTS processed_events_processing;
DROP INDEX CONCURRENTLY IF EXISTS processed_events_due;
