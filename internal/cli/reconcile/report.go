package reconcile

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/reconcile/compare"
)

// A report is what --json prints.
type report struct {
	compare.Report
	// Replayed counts the deliveries that --heal has made pending again.
	Replayed int64   `json:"replayed"`
	Seconds  float64 `json:"seconds"`
}

// A kind is one list of findings.
type kind struct {
	title string
	list  []compare.Finding
}

func (r *report) kinds() []kind {
	return []kind{{"never arrived", r.NeverArrived}, {"arrived, no effect", r.NoEffect}, {"effect without event", r.Strangers}, {"effect twice", r.Doubled}, {"processed, no effect", r.Missing}}
}

// row returns what is known of a finding.
func row(f compare.Finding) []any {
	event, state := "-", f.State
	if f.EventID != 0 {
		event = fmt.Sprint(f.EventID)
	}
	if f.Archived {
		event += " (archived)"
	}
	if f.Effects != 0 {
		state = plain.Plural(f.Effects, "effect", "effects")
	}
	return []any{f.Key, event, output.OrDash(f.EventType), output.OrDash(f.Destination), f.DeliveredAt, f.ReceivedAt, output.OrDash(state)}
}

// problem says how many findings there are; nil: all took effect.
func (r *report) problem() error {
	var parts []string
	for _, k := range r.kinds() {
		if len(k.list) > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", len(k.list), k.title))
		}
	}
	switch text := strings.Join(parts, "; "); {
	case text == "" && !r.Complete:
		return errors.New("more differs than was looked at; repeat the command with a larger --limit, or a later --since")
	case text == "":
		return nil
	case !r.Complete:
		return cli.Foundf("at least %s", text)
	default:
		return cli.Foundf("%s", text)
	}
}

func printReport(w io.Writer, r report) error {
	fmt.Fprintf(w, "%s to %s compared with %s of receiver %s from source %s\n", plain.Capital(plain.Plural(r.Sent, "delivery", "deliveries")),
		strings.Join(r.Destinations, ", "), plain.Plural(r.Received, "event", "events"), r.Receiver, r.Source)
	from := "the beginning"
	if r.Since != nil {
		from = output.Cell(r.Since)
	}
	why := map[string]string{"sender": ", the oldest event that the sender keeps", "receiver": ", from when on the receiver remembers everything"}[r.SinceReason]
	fmt.Fprintf(w, "  from %s%s, to %s\n", from, why, output.Cell(r.Until))
	var left []string
	for _, part := range []struct {
		n    int64
		text string
	}{
		{r.Young, "delivered too recently"},
		{r.Earlier, "delivered earlier"},
		{r.Pending, "pending"},
		{r.Failed, "failed"},
		{r.Discarded, "discarded"},
		{r.Forgotten, "forgotten by one side"},
		{r.Drilled, "of a drill"},
	} {
		if part.n > 0 {
			left = append(left, fmt.Sprintf("%d %s", part.n, part.text))
		}
	}
	if len(left) > 0 {
		fmt.Fprintf(w, "  left out: %s\n", strings.Join(left, ", "))
	}
	if !r.CountsEffects {
		fmt.Fprintln(w, "  effects were not counted (--effects, or the receiver's own query)")
	}
	for _, k := range r.kinds() {
		if len(k.list) == 0 {
			continue
		}
		fmt.Fprintf(w, "\n%s: %d\n", plain.Capital(k.title), len(k.list))
		if err := output.List(w, "", "KEY\tEVENT\tTYPE\tDESTINATION\tDELIVERED\tRECEIVED\tSTATE", k.list, row); err != nil {
			return err
		}
	}
	switch {
	case !r.Complete:
		fmt.Fprintln(w, "\nThere may be more: a list is at its limit (--limit).")
	case r.Sent == 0 && r.Received == 0 && r.Findings() == 0:
		fmt.Fprintln(w, "\nNothing was delivered and nothing was received in that time.")
	case r.Findings() == 0:
		fmt.Fprintln(w, "\nAll of it took effect, once.")
	}
	return nil
}
