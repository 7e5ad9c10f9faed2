package verdict_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/verdict"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestOf(t *testing.T) {
	t.Parallel()
	cause := errors.New("no stock")
	later := verdict.Verdict{Action: verdict.Retry, Timed: true, After: time.Minute}
	final := verdict.Verdict{Action: verdict.Fail}
	for name, c := range map[string]struct {
		err    error
		want   verdict.Verdict
		marked bool
	}{
		"no error":           {nil, verdict.Verdict{Action: verdict.Commit}, false},
		"any error":          {cause, verdict.Verdict{Action: verdict.Retry}, false},
		"an unknown event":   {fmt.Errorf("route: %w", verdict.ErrUnknownEvent), verdict.Verdict{Action: verdict.Ignore}, false},
		"a mark":             {later.Mark(cause), later, true},
		"a mark, wrapped":    {fmt.Errorf("ship: %w", later.Mark(cause)), later, true},
		"the outermost mark": {final.Mark(later.Mark(cause)), final, true},
		"a mark of nil":      {final.Mark(nil), verdict.Verdict{Action: verdict.Commit}, false},
	} {
		if got := verdict.Of(c.err); got != c.want || verdict.IsMarked(c.err) != c.marked {
			t.Errorf("%s: %+v, marked %v", name, got, verdict.IsMarked(c.err))
		}
	}
	if err := later.Mark(cause); !errors.Is(err, cause) || err.Error() != cause.Error() {
		t.Errorf("a mark changes the error: %v", err)
	}
}

// troubled is an error that cannot be asked what it is.
type troubled struct{}

func (troubled) Error() string { return "in trouble" }
func (troubled) Unwrap() error { panic("no") }

// An error whose methods panic does so in Examine, where a panic of the handler is caught, and not
// later.
func TestExamineAsksWhatIsAskedLater(t *testing.T) {
	t.Parallel()
	verdict.Examine(nil)
	verdict.Examine(errors.New("no stock"))
	defer func() {
		testkit.Equal(t, "panicked with", recover(), "no")
		testkit.Contains(t, "text", (&verdict.Panic{Cause: "no"}).Error(), "the handler panicked: no")
	}()
	verdict.Examine(troubled{})
}
