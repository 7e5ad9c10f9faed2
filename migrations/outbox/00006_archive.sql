-- The archive: settled events with their deliveries, partitioned by the month of the event.

-- +goose Up
CREATE TABLE outbox_archive (
    id                bigint           NOT NULL,
    event_type        text COLLATE "C" NOT NULL,
    event_version     integer          NOT NULL,
    payload           json             NOT NULL,
    idempotency_key   text COLLATE "C" NOT NULL,
    ordering_key      text COLLATE "C",
    related_reference text,
    headers           jsonb            NOT NULL,
    available_at      timestamptz      NOT NULL,
    created_at        timestamptz      NOT NULL,
    archived_at       timestamptz      NOT NULL DEFAULT now(),
    deliveries        jsonb            NOT NULL,
    PRIMARY KEY (id, created_at)
) PARTITION BY RANGE (created_at);

COMMENT ON TABLE outbox_archive IS 'Settled events with their deliveries. Whole months are dropped when they have been kept long enough.';

-- +goose Down
DROP TABLE outbox_archive;
