package main

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// A reader gives events to a receiver until ctx ends.
type reader interface {
	Run(ctx context.Context) error
}

// consume is one of the consumers: what a user of natsconsumer or kafkaconsumer writes, and a
// death.
func (o *options) consume(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, o.Database)
	if err != nil {
		return fmt.Errorf("open database: %w", err)
	}
	defer pool.Close()
	var effects atomic.Int64
	receive, err := consumer.New(pool, consumer.Config{
		Receiver: o.Receiver, Secrets: []string{o.Secret},
		Observe: func(_ context.Context, report consumer.Report) { // after the commit, before the acknowledgement
			fmt.Println(report.Result)
			if report.Result == consumer.ResultProcessed && effects.Add(1) == int64(o.DieAfter) {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			}
		},
	}, ship)
	if err != nil {
		return err
	}
	read := o.readNATS
	if o.Log == "kafka" {
		read = o.readKafka
	}
	events, end, err := read(receive)
	if err != nil {
		return err
	}
	defer end()
	for { // at the start of a cluster there may be no leader yet
		if err = events.Run(ctx); err == nil || ctx.Err() != nil {
			return nil
		}
		_ = sleep.For(ctx, 200*time.Millisecond)
	}
}

// The table has no unique key on purpose: an effect that happens twice must show.
const insertShipment = `INSERT INTO shipments (idempotency_key, ordering_key, sequence) VALUES ($1, $2, $3)`

// ship is the handler.
func ship(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
	_, err := tx.Exec(ctx, insertShipment, event.IdempotencyKey, event.OrderingKey, event.Sequence)
	return err
}
