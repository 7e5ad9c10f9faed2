-- Which database this is, so that a relay which wakes up on a copy of it sends nothing.

-- +goose Up
CREATE TABLE outbox_identity (
    only_row          boolean     PRIMARY KEY DEFAULT true,
    system_identifier bigint      NOT NULL,
    database_oid      bigint      NOT NULL,
    timeline          integer     NOT NULL,
    environment       text        NOT NULL,
    addresses         text[]      NOT NULL,
    recorded_at       timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT outbox_identity_is_one_row CHECK (only_row)
);

COMMENT ON TABLE outbox_identity IS 'The database that relays last accepted as theirs. On any other they quarantine.';

-- +goose Down
DROP TABLE outbox_identity;
