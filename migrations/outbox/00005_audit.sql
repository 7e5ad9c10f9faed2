-- What operators did: who, when, what and how much. Each row is written in the transaction of the change that it names.

-- +goose Up
CREATE TABLE outbox_audit (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at          timestamptz      NOT NULL DEFAULT now(),
    -- The last batch of a bulk operation. One that runs, and has not grown for a while, was killed.
    updated_at  timestamptz      NOT NULL DEFAULT now(),
    event_id    bigint,
    matched     bigint           NOT NULL DEFAULT 0,
    done        bigint           NOT NULL DEFAULT 0,
    actor       text             NOT NULL,
    origin      text COLLATE "C" NOT NULL,
    action      text COLLATE "C" NOT NULL,
    state       text COLLATE "C" NOT NULL DEFAULT 'done',
    destination text COLLATE "C",
    selection   jsonb,
    detail      text,
    CONSTRAINT outbox_audit_columns_are_sane CHECK (
        origin IN ('cli', 'api', 'page') AND state IN ('running', 'done', 'interrupted', 'failed') AND matched >= 0 AND done >= 0)
);

COMMENT ON TABLE outbox_audit IS 'What operators changed or revealed; never a payload. Nothing removes its rows.';
COMMENT ON COLUMN outbox_audit.actor IS 'Who: user@host of a command, the login of the API or the page; without either the database user.';
COMMENT ON COLUMN outbox_audit.selection IS 'What a bulk operation was to change, so that another process can go on with it.';
COMMENT ON COLUMN outbox_audit.matched IS 'How many deliveries the preview counted; 0: there was none.';
COMMENT ON COLUMN outbox_audit.done IS 'How many deliveries were changed so far.';

-- +goose Down
DROP TABLE outbox_audit;
