package watch

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A look that failed is repeated soon, however long it took to fail: what is wrong after the
// database hung is alerted.
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

// Looks that take long take a hundredth of the time, but none is so late that nothing can be
// concluded from the one before.
func TestRestsEnd(t *testing.T) {
	t.Parallel()
	w := &Watcher{Config: func() Config { return Config{}.WithDefaults() }}
	interval, failed := w.Config().Interval, errors.New("failed")
	for _, c := range []struct {
		took time.Duration
		slow int
		err  error
		want time.Duration
	}{
		{time.Second, 1, nil, 2 * interval},
		{time.Second, 3, nil, 100 * time.Second},
		{25 * time.Second, 1, nil, 2 * interval}, // the server may have stood still
		{25 * time.Second, 2, nil, 4 * interval},
		{25 * time.Second, 3, nil, longestRest},
		{25 * time.Second, 100, nil, longestRest},
		{30 * time.Second, 1, failed, 2 * interval},
		{30 * time.Second, 3, failed, 8 * interval},
		{30 * time.Second, 100, failed, 50 * time.Minute},
		{time.Millisecond, 1, failed, interval},
	} {
		if got := w.rest(max(interval, 100*c.took), interval, c.slow, c.err); got != c.want {
			t.Errorf("after %s, %d in a row, %v: %s, want %s", c.took, c.slow, c.err, got, c.want)
		}
	}
	testkit.Equal(t, "while an alert is open", w.rest(50*time.Minute, alertedInterval, 1, failed), 2*interval)
	if longestRest >= staleWatch {
		t.Errorf("rests of %s outlast what is concluded for %s", longestRest, staleWatch)
	}
}
