-- What a lane needs under production conditions: replays apart from what is new, and a breaker that all relays share.

-- +goose Up
-- A replay is a delivery that an operator made pending again. It waits behind what is new: hence in the hot index.
ALTER TABLE outbox_delivery ADD COLUMN replay boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN outbox_delivery.replay IS 'An operator made it pending again: it is sent after live events and backlog, and says so in a header.';

-- Room for every row of a page to be claimed at once: a claimed row is longer than it was, and while a long transaction
-- pins the horizon, no room is won by pruning.
ALTER TABLE outbox_delivery SET (fillfactor = 45);

DROP INDEX outbox_delivery_due;
CREATE INDEX outbox_delivery_due ON outbox_delivery (destination, replay, next_attempt_at, event_id) WHERE status = 'pending';

ALTER TABLE outbox_destination
    -- closed: deliveries flow. open: nothing is claimed until breaker_until. half_open: breaker_owner tries alone, until
    -- breaker_until.
    ADD COLUMN breaker           text COLLATE "C" NOT NULL DEFAULT 'closed',
    ADD COLUMN breaker_opened_at timestamptz,
    ADD COLUMN breaker_until     timestamptz,
    ADD COLUMN breaker_owner     integer,
    ADD COLUMN breaker_probes    integer          NOT NULL DEFAULT 0,
    ADD COLUMN breaker_error     text,
    ADD CONSTRAINT outbox_destination_breaker_is_known CHECK (breaker IN ('closed', 'open', 'half_open')),
    ADD CONSTRAINT outbox_destination_breaker_has_times
        CHECK ((breaker = 'closed') = (breaker_opened_at IS NULL) AND (breaker = 'closed') = (breaker_until IS NULL)),
    ADD CONSTRAINT outbox_destination_breaker_owner_tries CHECK ((breaker = 'half_open') = (breaker_owner IS NOT NULL));

-- +goose Down
ALTER TABLE outbox_destination
    DROP COLUMN breaker, DROP COLUMN breaker_opened_at, DROP COLUMN breaker_until, DROP COLUMN breaker_owner,
    DROP COLUMN breaker_probes, DROP COLUMN breaker_error;
DROP INDEX outbox_delivery_due;
ALTER TABLE outbox_delivery SET (fillfactor = 50);
ALTER TABLE outbox_delivery DROP COLUMN replay;
CREATE INDEX outbox_delivery_due ON outbox_delivery (destination, next_attempt_at, event_id) WHERE status = 'pending';
