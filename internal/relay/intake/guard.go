package intake

import (
	"fmt"
	"strings"
	"time"
)

// Origin is the server that gave out the transaction ids of events and ranges.
type Origin struct {
	SystemIdentifier int64 // 0: the server did not tell
	Timeline         int32 // 0: the server did not tell

	recordedBefore time.Time // of what was found: when the recorded one was written
}

// A ForeignError says that the transaction ids in the tables are not this server's, or may not be:
// no range may be taken. Events would never be found, without any other error.
type ForeignError struct {
	Recorded, Found Origin
	// Future says that the last range ends with transactions that this server has not begun.
	Future bool
}

// IsFailover reports whether nothing but the timeline differs, as after the promotion of a standby.
// Its ids continue those of the tables: [AcceptTimeline] is enough, and what this relay has in hand
// is void. Otherwise it takes [Rebase].
func (e *ForeignError) IsFailover() bool {
	return !e.Future && !differ(e.Recorded.SystemIdentifier, e.Found.SystemIdentifier)
}

func (e *ForeignError) Error() string {
	var why []string
	if differ(e.Recorded.SystemIdentifier, e.Found.SystemIdentifier) {
		why = append(why, fmt.Sprintf("the system identifier is %d, recorded is %d", e.Found.SystemIdentifier, e.Recorded.SystemIdentifier))
	}
	if differ(e.Recorded.Timeline, e.Found.Timeline) {
		why = append(why, fmt.Sprintf("the timeline is %d, recorded is %d", e.Found.Timeline, e.Recorded.Timeline))
	}
	if e.Future {
		why = append(why, "relays have come to transactions that this server has not begun")
	}
	return "the transaction ids of the events are from another server: " + strings.Join(why, "; ")
}

// differ reports whether both are known and not equal.
func differ[T int32 | int64](a, b T) bool { return a != b && a != 0 && b != 0 }
