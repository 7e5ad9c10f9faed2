package batch

import (
	"context"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

const (
	// pacedRest is how many times as long as a step took the pause behind it lasts: what is urgent
	// shares the database.
	pacedRest = 4
	// pacedPause is the shortest pause.
	pacedPause = 10 * time.Millisecond
	// pacedPatience is how often in a row a step may meet the lock of another session.
	pacedPatience = 5
)

// Paced repeats step while there is more to do, each time after ready, and rests in proportion to
// what the last step took. A step that met the lock of another session is repeated. The error is
// that of ready or of a step, or why ctx ended during a rest.
func Paced(ctx context.Context, ready func() error, step func() (more bool, err error)) error {
	failed := 0
	for {
		if err := ready(); err != nil {
			return err
		}
		began := time.Now()
		more, err := step()
		took := time.Since(began)
		switch {
		case err == nil && !more:
			return nil
		case err == nil:
			failed = 0
		case pg.IsConflict(err) && failed < pacedPatience:
			failed++
		default:
			return err
		}
		if err := sleep.For(ctx, max(pacedPause, pacedRest*took)); err != nil {
			return err
		}
	}
}
