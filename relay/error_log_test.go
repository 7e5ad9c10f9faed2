package relay

import (
	"testing"
	"time"
)

func TestErrorsAreToldOnceInAWhile(t *testing.T) {
	t.Parallel()
	var l errorLog
	at := time.Now()
	for n, step := range []struct {
		after           time.Duration
		operation, text string
		again           int
		tell            bool
	}{
		{0, "claim", "refused", 0, true},
		{time.Second, "claim", "refused", 0, false},
		{0, "session", "refused", 0, true},
		{repeatAfter - 2*time.Second, "claim", "refused", 0, false},
		{time.Second, "claim", "refused", 3, true},
		{time.Second, "claim", "refused", 0, false},
		{0, "claim", "no such login", 0, true},
		{0, "claim", "refused", 0, false},
		{0, "claim", "reset by 127.0.0.1:44740", 0, true},
		{0, "claim", "reset by 127.0.0.1:44754", 0, false},
		{repeatAfter, "claim", "refused", 3, true},
	} {
		at = at.Add(step.after)
		if again, tell := l.tell(step.operation, step.text, at); again != step.again || tell != step.tell {
			t.Errorf("step %d: %d, %t", n, again, tell)
		}
	}
}
