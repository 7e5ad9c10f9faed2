package sleep_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/sleep"
)

func TestFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		began := time.Now()
		if err := sleep.For(ctx, time.Hour); err != nil || time.Since(began) != time.Hour {
			t.Errorf("waited %v: %v", time.Since(began), err)
		}
		began = time.Now()
		time.AfterFunc(time.Minute, cancel)
		if err := sleep.For(ctx, time.Hour); !errors.Is(err, context.Canceled) || time.Since(began) != time.Minute {
			t.Errorf("waited %v until its context ended: %v", time.Since(began), err)
		}
	})
}
