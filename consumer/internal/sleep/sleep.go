// Package sleep waits for a time, or until a context ends.
package sleep

import (
	"context"
	"time"
)

// For waits for d, or until ctx ends, and returns the error of ctx, nil if it has not ended. It is
// not the cause, as callers of Prune compare the error with context.Canceled.
func For(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
	return ctx.Err()
}
