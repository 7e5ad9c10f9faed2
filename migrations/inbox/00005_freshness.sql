-- The newest version of each entity that a receiver has applied, so that a late event does not undo a newer one.
--
-- A row outlives its entity: it is what keeps a late update from bringing a deleted one back. Delete rows only of
-- entities of which no event can come any more.

-- +goose Up
CREATE TABLE inbox_freshness (
    scope      text COLLATE "C" NOT NULL,
    entity     text COLLATE "C" NOT NULL,
    -- A version is a number, or a time and what decides between equal times.
    sequence   bigint,
    at         timestamptz,
    tiebreak   bigint,
    updated_at timestamptz      NOT NULL DEFAULT now(),
    CONSTRAINT inbox_freshness_pkey PRIMARY KEY (scope, entity),
    CONSTRAINT inbox_freshness_scope_is_1_to_255_bytes CHECK (octet_length(scope) BETWEEN 1 AND 255),
    CONSTRAINT inbox_freshness_entity_is_1_to_255_bytes CHECK (octet_length(entity) BETWEEN 1 AND 255),
    -- Also what refuses to compare the one kind with the other.
    CONSTRAINT inbox_freshness_is_by_sequence_or_by_time
        CHECK ((sequence IS NULL) <> (at IS NULL) AND (at IS NULL) = (tiebreak IS NULL))
) WITH (fillfactor = 80); -- room for updates in place: no column of an index changes

COMMENT ON TABLE inbox_freshness IS 'The newest version of each entity that was applied: what comes with an older one is stale.';

-- +goose Down
DROP TABLE inbox_freshness;
