package watch

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/relay/alert"
)

// A look that failed is repeated soon, however long it took to fail: what is wrong after the database hung is alerted.
func TestFailedLookIsRepeatedSoon(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`ALTER TABLE outbox_watch RENAME TO outbox_watch_away`)
	w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
	failed := make(chan struct{}, 1)
	w.Config = func() Config { return Config{Interval: time.Millisecond}.WithDefaults() }
	w.Rest = func(time.Duration, time.Duration) time.Duration { return time.Hour } // a hundred times what a hung statement takes
	w.Failed = func(string, error) {
		select {
		case failed <- struct{}{}:
		default:
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { w.Run(ctx) })
	defer running.Wait()
	defer stop()
	<-failed
	db.Exec(`ALTER TABLE outbox_watch_away RENAME TO outbox_watch`)
	relaytest.Becomes(db, true, `SELECT watched_at > now() - interval '1 minute' FROM outbox_watch`)
}

// Looks that take long take a hundredth of the time, but none is so late that nothing can be concluded from the one before.
func TestRestsEnd(t *testing.T) {
	t.Parallel()
	w := &Watcher{
		Config: func() Config { return Config{}.WithDefaults() },
		Rest:   func(least, took time.Duration) time.Duration { return max(least, 100*took) },
	}
	interval := w.Config().Interval
	for _, c := range []struct {
		least, took time.Duration
		failures    int
		want        time.Duration
	}{
		{interval, time.Millisecond, 0, interval},
		{interval, time.Second, 0, 100 * time.Second},
		{interval, 25 * time.Second, 0, longestRest}, // it stood still meanwhile
		{interval, 30 * time.Second, 1, 2 * interval},
		{alertedInterval, 30 * time.Second, 1, 2 * interval},
		{interval, 30 * time.Second, 2, 4 * interval},
		{interval, 30 * time.Second, 100, 50 * time.Minute},
		{interval, time.Millisecond, 1, interval},
	} {
		if got := w.rest(c.least, c.took, c.failures); got != c.want {
			t.Errorf("after %s and %d failures: %s, want %s", c.took, c.failures, got, c.want)
		}
	}
	if longestRest >= staleWatch {
		t.Errorf("rests of %s outlast what is concluded for %s", longestRest, staleWatch)
	}
}
