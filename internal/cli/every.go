package cli

import (
	"context"
	"time"
)

// EverySecond runs f at once and then every second, until ctx is done, which is no error, or f
// fails.
func EverySecond(ctx context.Context, f func() error) error {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		if err := f(); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}
