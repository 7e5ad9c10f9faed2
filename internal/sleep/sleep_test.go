package sleep_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

func TestFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		interrupted := errors.New("interrupted")
		ctx, cancel := context.WithCancelCause(t.Context())
		began := time.Now()
		if err := sleep.For(ctx, time.Hour); err != nil || time.Since(began) != time.Hour {
			t.Errorf("waited %v: %v", time.Since(began), err)
		}
		began = time.Now()
		time.AfterFunc(time.Minute, func() { cancel(interrupted) })
		if err := sleep.For(ctx, time.Hour); !errors.Is(err, interrupted) || time.Since(began) != time.Minute {
			t.Errorf("waited %v until its context ended: %v", time.Since(began), err)
		}
	})
}
