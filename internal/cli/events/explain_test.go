package events

import (
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A held delivery is probed for hours: the probes are two lines, and attempts that differ are
// printed each.
func TestExplanationOfManyProbes(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC)
	x := ops.Explanation{History: []ops.Moment{{At: at, What: "inserted", Text: "inserted as event 1 of type t"}}}
	attempt := func(n, by, how string) {
		at = at.Add(time.Minute)
		x.History = append(x.History, ops.Moment{At: at, Destination: "d", What: "attempt", Text: "attempt " + n + " by relay " + by + " failed after 5ms: " + how})
	}
	for range 9 {
		attempt("1", "1", "refused: it is down")
	}
	attempt("1", "2", "refused: it is down")
	attempt("1", "1", "503")
	attempt("2", "1", "503")
	var b strings.Builder
	testkit.Must(t, printExplanation(&b, explanation{Explanation: x}))
	const want = `2026-01-02 03:00:00.000  inserted as event 1 of type t
2026-01-02 03:01:00.000  d: attempt 1 by relay 1 failed after 5ms: refused: it is down
2026-01-02 03:10:00.000  d: 8 more like it, then attempt 1 by relay 2 failed after 5ms: refused: it is down
2026-01-02 03:11:00.000  d: attempt 1 by relay 1 failed after 5ms: 503
2026-01-02 03:12:00.000  d: attempt 2 by relay 1 failed after 5ms: 503
`
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
}

// A header that no event may bring is not one that the destination drops: the event is not sent.
func TestExplanationOfHeaders(t *testing.T) {
	t.Parallel()
	report := ops.EventReport{Event: ops.Event{HeaderNames: []string{"Authorization", "X-Custom", "Traceparent"}}, Deliveries: []ops.Delivery{{Destination: "d"}}}
	var b strings.Builder
	testkit.Must(t, printExplanation(&b, explanation{DroppedHeaders: droppedHeaders(&config.Config{}, report), Explanation: ops.Explanation{Waits: []ops.Wait{{}}}}))
	const want = `  d: no event may bring the header Authorization, so the event is not sent
  d: the header X-Custom is not sent; events may set what event_headers of the destination names
`
	if !strings.HasPrefix(b.String(), want) {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
}
