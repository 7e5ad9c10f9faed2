package consumer_test

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
)

// Every process of a receiver may do this beside its server, until ctx ends.
func ExamplePrune() {
	forget := func(ctx context.Context, pool *pgxpool.Pool) {
		daily := time.NewTicker(24 * time.Hour)
		defer daily.Stop()
		for {
			pruned, err := consumer.Prune(ctx, pool, consumer.PruneConfig{
				Receiver:  "logistics",
				Retention: 90 * 24 * time.Hour, // a relay may send an event again for 30 days
			})
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				slog.Error("prune processed events", "error", err) // goes on tomorrow
			default:
				slog.Info("pruned processed events", "removed", pruned.Removed, "remembers_since", pruned.RemembersSince)
			}
			select {
			case <-daily.C:
			case <-ctx.Done():
				return
			}
		}
	}
	_ = forget // go forget(ctx, pool)
}
