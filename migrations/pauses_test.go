package migrations

import (
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// After autovacuum was interrupted, the next attempt comes at once, unless time is up; then pauses
// continue.
func TestPauses(t *testing.T) {
	t.Parallel()
	p := &pauses{BackOff: backoff.NewConstantBackOff(time.Second), skip: true}
	for i, want := range []time.Duration{0, time.Second, time.Second} {
		if got := p.NextBackOff(); got != want {
			t.Errorf("pause %d is %s, want %s", i, got, want)
		}
	}
	p = &pauses{BackOff: &backoff.StopBackOff{}, skip: true}
	if got := p.NextBackOff(); got != backoff.Stop {
		t.Errorf("continues after %s though time is up", got)
	}
}
