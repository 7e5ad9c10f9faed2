package events

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Explain is the command explain.
type Explain struct {
	config.DatabaseFlags
	eventArg
	JSON bool `help:"Print JSON: {event, history, waits, dropped_headers}. Fields are added, never renamed or removed."`
}

func (Explain) Help() string {
	return `Tells the history of one event in the order of time, from its insert on: every attempt that the log holds, what became of
each delivery, and why what is pending still waits, with the command that continues.

  outbox-relay explain 17
  outbox-relay explain invoice-4711      # by its idempotency key, or its related reference`
}

func (cmd Explain) Run(inv *cli.Invocation) error {
	c, err := config.ReadToLook(inv, "database")
	if err != nil {
		return err
	}
	var report ops.EventReport
	err = c.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) (err error) {
		report, err = cmd.report(ctx, inv, outbox, false)
		return err
	})
	if err != nil {
		return err
	}
	return output.Show(inv.Stdout, cmd.JSON, explanation{report.Explain(), droppedHeaders(c, report)}, printExplanation)
}

// An explanation is that of the event, with what its headers come to by this configuration.
type explanation struct {
	ops.Explanation
	DroppedHeaders []droppedHeader `json:"dropped_headers"`
}

// A droppedHeader is a header of an event that a destination does not let through.
type droppedHeader struct {
	Destination string `json:"destination"`
	Header      string `json:"header"`
	Reserved    bool   `json:"reserved"` // no event may bring it: one that does is not sent at all
}

func (h droppedHeader) String() string {
	name := output.Printable(h.Header)
	if h.Reserved {
		return fmt.Sprintf("%s: no event may bring the header %s, so the event is not sent", h.Destination, name)
	}
	return fmt.Sprintf("%s: the header %s is not sent; events may set what event_headers of the destination names", h.Destination, name)
}

// droppedHeaders returns what is not sent of the headers of an event. A destination that this
// configuration lacks counts as one that sets no event_headers.
func droppedHeaders(c *config.Config, report ops.EventReport) []droppedHeader {
	all := []droppedHeader{}
	for _, d := range report.Deliveries {
		var allowed []string
		for _, configured := range c.Relay.Destinations {
			if configured.Name == d.Destination {
				allowed = configured.Wire.EventHeaders
			}
		}
		for _, name := range report.Event.HeaderNames {
			if d.Destination != "" && !webhook.EventMaySet(allowed, name) {
				all = append(all, droppedHeader{d.Destination, name, webhook.ReservedForEvents(name)})
			}
		}
	}
	return all
}

func printExplanation(w io.Writer, x explanation) error {
	const alike = 3 // as many are printed whole
	for i := 0; i < len(x.History); i++ {
		m, last := x.History[i], i
		for last+1 < len(x.History) && isAlike(m, x.History[last+1]) {
			last++
		}
		printMoment(w, m, "")
		if more := last - i - 1; more >= alike {
			i = last
			printMoment(w, x.History[last], fmt.Sprintf("%d more like it, then ", more))
		}
	}
	for _, h := range x.DroppedHeaders {
		output.Prose(w, "  ", "  "+h.String())
	}
	printWaits(w, x.Waits)
	if len(x.History) == 1 && len(x.Waits) == 0 {
		fmt.Fprintln(w, "\nIt has no delivery, so that nothing sends it: outbox-relay events create-deliveries")
	}
	return nil
}

// isAlike reports whether two moments are attempts with the same number and end: a held delivery is
// probed for hours.
func isAlike(a, b ops.Moment) bool {
	number, of, isAttempt := strings.Cut(a.Text, " by relay ")
	_, end, _ := strings.Cut(of, ": ")
	return isAttempt && a.What == "attempt" && a.What == b.What && a.Destination == b.Destination && strings.HasPrefix(b.Text, number+" by ") && strings.HasSuffix(b.Text, ": "+end)
}

func printMoment(w io.Writer, m ops.Moment, before string) {
	at := m.At.UTC().Format("2006-01-02 15:04:05.000") + "  "
	text := before + m.Text
	if m.Destination != "" {
		text = m.Destination + ": " + text
	}
	output.Prose(w, strings.Repeat(" ", len(at)), at+text)
}
