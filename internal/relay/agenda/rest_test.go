package agenda

import (
	"testing"
	"time"
)

func TestRestIsBounded(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rest Rest
		took time.Duration
		want time.Duration
	}{
		{Rest{Least: 5 * time.Second, Times: 100}, time.Millisecond, 5 * time.Second},
		{Rest{Least: 5 * time.Second, Times: 100}, 20 * time.Second, 2000 * time.Second},
		{Rest{Least: 5 * time.Second, Times: 100, Most: time.Minute}, 100 * time.Millisecond, 10 * time.Second},
		{Rest{Least: 5 * time.Second, Times: 100, Most: time.Minute}, 20 * time.Second, time.Minute},
		{Rest{Least: time.Hour, Times: 100, Most: time.Minute}, time.Second, time.Hour}, // as configured
	} {
		if got := c.rest.After(c.took); got != c.want {
			t.Errorf("%+v after %s: %s, want %s", c.rest, c.took, got, c.want)
		}
	}
}
