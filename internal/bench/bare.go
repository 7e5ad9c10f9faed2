package main

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgxpool"
)

// bareTable is no system: a table with the columns of outbox, its types and its unique key, and
// nothing else. It shows what an insert costs at least.
type bareTable struct{}

const (
	createBare = `
CREATE TABLE bare_outbox (
    id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_type        text COLLATE "C" NOT NULL,
    event_version     integer          NOT NULL DEFAULT 1,
    payload           json             NOT NULL,
    idempotency_key   text COLLATE "C" NOT NULL UNIQUE,
    ordering_key      text COLLATE "C",
    related_reference text,
    headers           jsonb            NOT NULL DEFAULT '{}',
    available_at      timestamptz      NOT NULL DEFAULT now(),
    created_at        timestamptz      NOT NULL DEFAULT now()
)`
	insertBare = `INSERT INTO bare_outbox (event_type, payload, idempotency_key) VALUES ('t0.made', $1, $2)`
)

var errBare = errors.New("the bare table takes inserts alone")

func (bareTable) prepare(ctx context.Context, _ *rig, db *database, _ load) error {
	return db.exec(ctx, createBare)
}

func (bareTable) fill(context.Context, *database, load, int, int) error { return errBare }

func (bareTable) start(context.Context, *rig, *database, load) ([]*process, error) {
	return nil, errBare
}

func (bareTable) unsettled() string { return "" }

func (bareTable) producer(pool *pgxpool.Pool, l load) (func(ctx context.Context, n int) error, error) {
	return insertBy(insertBare, pool, l), nil
}
