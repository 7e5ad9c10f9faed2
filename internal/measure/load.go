package measure

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// Closed lets each client produce one event after the other for a while. Events are numbered from
// 1, and Closed returns how many there were.
func Closed(ctx context.Context, clients int, duration time.Duration, produce func(ctx context.Context, n int) error) (int, error) {
	deadline := time.Now().Add(duration)
	var next atomic.Int64
	failures := make([]error, clients)
	var working sync.WaitGroup
	for client := range clients {
		working.Go(func() {
			for failures[client] == nil && time.Now().Before(deadline) {
				failures[client] = produce(ctx, int(next.Add(1)))
			}
		})
	}
	working.Wait()
	return int(next.Load()), errors.Join(failures...)
}

// Open lets workers produce events at the times that they are meant for, however late those before
// them are: event n, counted from 0, when n events at the rate have come. It returns when that
// began.
func Open(ctx context.Context, workers, count, perSecond int, produce func(ctx context.Context, n int) error) (begun time.Time, err error) {
	due := make(chan int, count)
	failures := make([]error, workers, workers+1)
	var working sync.WaitGroup
	for worker := range workers {
		working.Go(func() {
			for n := range due {
				if err := produce(ctx, n); err != nil {
					failures[worker] = err
				}
			}
		})
	}
	begun = time.Now()
	for n := range count {
		if wait := time.Until(DueAt(begun, n, perSecond)); wait > 0 {
			_ = sleep.For(ctx, wait)
		}
		due <- n
	}
	close(due)
	working.Wait()
	return begun, errors.Join(append(failures, ctx.Err())...)
}

// DueAt returns when event n of [Open] is meant to be produced.
func DueAt(begun time.Time, n, perSecond int) time.Time {
	return begun.Add(time.Duration(n) * time.Second / time.Duration(perSecond))
}

// Quantile returns the value below which q of the sorted values lie. There must be one at least.
func Quantile(sorted []float64, q float64) float64 {
	return sorted[int(q*float64(len(sorted)-1)+0.5)]
}
