package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// textbook is the outbox as articles show it: one table, and a loop that locks a batch, sends it,
// marks it and commits.
type textbook struct{}

const (
	createTextbook = `
CREATE TABLE textbook_outbox (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    destination     int         NOT NULL,
    event_type      text        NOT NULL,
    payload         json        NOT NULL,
    idempotency_key text        NOT NULL UNIQUE,
    created_at      timestamptz NOT NULL DEFAULT now(),
    sent_at         timestamptz
)`
	indexTextbook = `CREATE INDEX ON textbook_outbox (id) WHERE sent_at IS NULL`

	fillTextbook = `
INSERT INTO textbook_outbox (destination, event_type, payload, idempotency_key)
SELECT i % $3, 't0.made', ` + payloadSQL + `, 'k-' || i FROM generate_series($1::int, $2::int) i`

	insertTextbook = `INSERT INTO textbook_outbox (destination, event_type, payload, idempotency_key) VALUES (0, 't0.made', $1, $2)`

	lockTextbook = `
SELECT id, destination, idempotency_key, payload::text FROM textbook_outbox
WHERE sent_at IS NULL ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED`

	markTextbook = `UPDATE textbook_outbox SET sent_at = now() WHERE id = ANY ($1)`

	unsettledTextbook = `SELECT EXISTS (SELECT FROM textbook_outbox WHERE sent_at IS NULL)`

	textbookBatch = 100
	textbookPoll  = 100 * time.Millisecond
)

func (textbook) unsettled() string { return unsettledTextbook }

func (textbook) prepare(ctx context.Context, _ *rig, db *database, _ load) error {
	if err := db.exec(ctx, createTextbook); err != nil {
		return err
	}
	return db.exec(ctx, indexTextbook)
}

func (textbook) fill(ctx context.Context, db *database, l load, first, count int) error {
	return db.exec(ctx, fillTextbook, first, first+count-1, l.destinations, padding(l.payload))
}

func (textbook) producer(pool *pgxpool.Pool, l load) (func(ctx context.Context, n int) error, error) {
	return insertBy(insertTextbook, pool, l), nil
}

func (textbook) start(ctx context.Context, r *rig, db *database, l load) ([]*process, error) {
	return r.startPeer(ctx, "textbook", r.peer(db, l))
}

// playTextbook runs the loop until its input ends.
func playTextbook(ctx context.Context, p *peer) error {
	pool, err := pgxpool.New(ctx, p.DSN)
	if err != nil {
		return err
	}
	defer pool.Close()
	return untilEnd(ctx, func(ctx context.Context) error {
		for ctx.Err() == nil {
			sent, err := sendBatch(ctx, pool, p)
			if err != nil {
				return err
			}
			if sent > 0 {
				continue
			}
			_ = sleep.For(ctx, textbookPoll)
		}
		return nil
	})
}

// sendBatch is one round: its transaction stays open while the requests are under way.
func sendBatch(ctx context.Context, pool *pgxpool.Pool, p *peer) (sent int, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, lockTextbook, textbookBatch)
		if err != nil {
			return err
		}
		batch, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (e event, err error) {
			err = row.Scan(&e.id, &e.destination, &e.key, &e.body)
			return e, err
		})
		if err != nil || len(batch) == 0 {
			return err
		}
		var posting sync.WaitGroup
		failures := make([]error, len(batch))
		ids := make([]int64, len(batch))
		for i, e := range batch {
			ids[i] = e.id
			posting.Go(func() { failures[i] = p.post(ctx, e) })
		}
		posting.Wait()
		if err := errors.Join(failures...); err != nil {
			return fmt.Errorf("post: %w", err)
		}
		sent = len(batch)
		_, err = tx.Exec(ctx, markTextbook, ids)
		return err
	})
	return sent, err
}
