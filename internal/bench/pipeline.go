package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// pipelined measures what one insert takes the server when no round trip and no commit of its own
// come between two.
func (r *rig) pipelined(ctx context.Context, s system, sql string) (found sample, err error) {
	const batches, size = 20, 1000
	db, err := r.fresh(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.drop(ctx, db)) }()
	if err := s.prepare(ctx, r, db, load{}.withDefaults()); err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, db.dsn)
	if err != nil {
		return nil, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	pad := `,"pad":"` + padding(300) + `"}`
	insert := func(from int) error {
		var batch pgx.Batch
		for n := from; n < from+size; n++ {
			number := strconv.Itoa(n)
			batch.Queue(sql, `{"n":`+number+pad, "k-"+number)
		}
		return conn.SendBatch(ctx, &batch).Close()
	}
	if err := insert(0); err != nil { // the first one fills the session's caches
		return nil, fmt.Errorf("insert: %w", err)
	}
	used, err := r.during(ctx, db, new([]*process), func() error {
		for b := range batches {
			if err := insert((b + 1) * size); err != nil {
				return fmt.Errorf("insert: %w", err)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	const events = batches * size
	return used.perEvent(sample{"took": float64(used.window) / float64(time.Microsecond) / events}, events), nil
}
