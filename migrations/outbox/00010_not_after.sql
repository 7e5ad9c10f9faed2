-- What receivers are promised: that nothing of a delivery comes later than this, unless an operator replays it. It is
-- part of the claim, so that it stands before the request is sent.

-- +goose Up
ALTER TABLE outbox_delivery
    ADD COLUMN not_after timestamptz,
    -- No row has one yet, so that nothing needs to be read for this.
    ADD CONSTRAINT outbox_delivery_not_after_is_finite CHECK (isfinite(not_after)) NOT VALID;
COMMENT ON COLUMN outbox_delivery.not_after IS 'When the last request may reach the receiver, as X-Outbox-Not-After has told it, or may have told it; afterwards only an operator sends it again. NULL: it was told nothing, or has accepted.';

-- A claimed row is longer by another eight bytes: room, again, for every row of a page to be claimed at once.
ALTER TABLE outbox_delivery SET (fillfactor = 44);

-- +goose Down
ALTER TABLE outbox_delivery SET (fillfactor = 45);
ALTER TABLE outbox_delivery DROP CONSTRAINT outbox_delivery_not_after_is_finite, DROP COLUMN not_after;
