package webhook

import (
	"testing"
	"time"
)

func TestCheckClock(t *testing.T) {
	t.Parallel()
	before := time.Now()
	after := before.Add(time.Minute)
	for now, agrees := range map[time.Time]bool{
		before: true, after.Add(maxSkew): true, before.Add(-maxSkew): true,
		after.Add(maxSkew + 1): false, before.Add(-maxSkew - 1): false, after.AddDate(1, 0, 0): false,
	} {
		if err := CheckClock(before, now, after); (err == nil) != agrees {
			t.Errorf("%s after the beginning: %v", now.Sub(before), err)
		}
	}
}
