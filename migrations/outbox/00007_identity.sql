-- Which database this is, so that a relay which wakes up on a copy of it sends nothing.

-- +goose Up
CREATE TABLE outbox_identity (
    only_row          boolean          PRIMARY KEY DEFAULT true,
    -- What PostgreSQL itself says. A dump that is restored has another oid or system; a copied data directory has neither.
    -- 0: the server does not tell.
    system_identifier bigint           NOT NULL,
    database_oid      bigint           NOT NULL,
    timeline          integer          NOT NULL,
    -- What relays are configured with. Empty: none of them names its environment.
    environment       text COLLATE "C" NOT NULL,
    addresses         text[]           NOT NULL,
    recorded_at       timestamptz      NOT NULL DEFAULT now(),
    CONSTRAINT outbox_identity_is_one_row CHECK (only_row),
    CONSTRAINT outbox_identity_environment_is_at_most_63_printable_ascii
        CHECK (octet_length(environment) <= 63 AND environment !~ '[^\x20-\x7e]')
);

COMMENT ON TABLE outbox_identity IS 'The database that relays last accepted as theirs. On any other they quarantine.';

ALTER TABLE outbox_relay
    ADD COLUMN quarantined text,
    ADD COLUMN environment text,
    ADD COLUMN address     text;
COMMENT ON COLUMN outbox_relay.quarantined IS 'Why the relay does nothing here. Null: it works. Set together with its environment and address, which accepting records.';

-- +goose Down
ALTER TABLE outbox_relay DROP COLUMN quarantined, DROP COLUMN environment, DROP COLUMN address;
DROP TABLE outbox_identity;
