package inbox

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

type listCommand struct {
	filterFlags
	Status     []string `enum:"pending,processing,succeeded,ignored,failed,recorded" placeholder:"STATUS" help:"pending, processing, succeeded, ignored or failed; several with commas. With --remembered: succeeded, ignored, failed or recorded (by an inbox). Default: any."`
	Remembered bool     `help:"List what the receiver remembers (processed_events), also of events that no inbox has: in the order of receiver, source and key."`
	Limit      int64    `default:"50" help:"How many at most."`
	Before     int64    `placeholder:"ID" help:"Go on behind a list that ended with this inbox id."`
	After      string   `placeholder:"PLACE" help:"With --remembered: continue behind a list that ended there, as it says."`
	JSON       bool     `help:"Print JSON: {events, next}, or {remembered, next}; next is for --before or --after, absent at the end. Fields are added, never renamed or removed."`
}

func (cmd listCommand) Run(inv *cli.Invocation) error {
	s, err := cmd.selection(cmd.Status)
	switch {
	case err != nil:
		return err
	case cmd.Limit < 1 || cmd.Limit > 10_000:
		return cli.Usagef("--limit: %d is out of range; write 1 to 10000", cmd.Limit)
	case cmd.Before < 0:
		return cli.Usagef("--before: %d is not an inbox id; they begin at 1", cmd.Before)
	case cmd.Remembered && (cmd.OrderingKey != "" || cmd.From != 0 || cmd.To != 0 || cmd.Before != 0):
		return cli.Usagef("--remembered excludes --ordering-key, --from, --to and --before: only inboxes know them")
	case cmd.After != "" && !cmd.Remembered:
		return cli.Usagef("--after needs --remembered; a list of the inbox continues with --before")
	}
	for _, state := range s.States {
		switch {
		case cmd.Remembered && !strings.Contains("succeeded ignored failed recorded", state):
			return cli.Usagef("--status %s: events with --remembered are succeeded, ignored, failed or recorded", state)
		case !cmd.Remembered && state == inboxops.Recorded:
			return cli.Usagef("--status recorded needs --remembered: it says that an inbox has the event")
		}
	}
	after, err := parsePlace(cmd.After)
	if err != nil {
		return err
	}
	s.Limit = cmd.Limit
	return ask(inv, supportRole, func(ctx context.Context, _ *config.Config, ops *inboxops.Ops) error {
		if s.Since, s.Until, err = cmd.times().Bounds(ctx, ops); err != nil {
			return err
		}
		if cmd.Remembered {
			page, err := ops.Remembered(ctx, s, after)
			if err != nil {
				return err
			}
			return output.Show(inv.Stdout, cmd.JSON, listedMemory{output.OrEmpty(page.Remembered), placeOf(page.Next)}, printMemoryList)
		}
		if cmd.Before > 0 && (s.ToID == 0 || s.ToID >= cmd.Before) {
			if s.ToID = cmd.Before - 1; s.ToID < max(s.FromID, 1) {
				return output.Show(inv.Stdout, cmd.JSON, listedEvents{Events: []inboxops.Event{}}, printList)
			}
		}
		page, err := ops.List(ctx, s)
		if err != nil {
			return err
		}
		return output.Show(inv.Stdout, cmd.JSON, listedEvents{output.OrEmpty(page.Events), page.Next}, printList)
	})
}

// listedEvents is what inbox list --json prints.
type listedEvents struct {
	Events []inboxops.Event `json:"events"`
	Next   int64            `json:"next,omitempty,string"`
}

// listedMemory is what inbox list --remembered --json prints.
type listedMemory struct {
	Remembered []inboxops.Memory `json:"remembered"`
	Next       string            `json:"next,omitempty"`
}

// placeOf names a place in the memory in one word: receiver/source/key, each escaped as in a URL.
func placeOf(key *inboxops.MemoryKey) string {
	if key == nil {
		return ""
	}
	return url.PathEscape(key.Receiver) + "/" + url.PathEscape(key.Source) + "/" + url.PathEscape(key.IdempotencyKey)
}

func parsePlace(text string) (key inboxops.MemoryKey, err error) {
	if text == "" {
		return key, nil
	}
	parts := strings.Split(text, "/")
	if len(parts) != 3 {
		return key, cli.Usagef("--after: %s is not a place as a list shows it, such as shipping/finance/invoice-17", settings.Quote(text))
	}
	for i, into := range []*string{&key.Receiver, &key.Source, &key.IdempotencyKey} {
		if *into, err = url.PathUnescape(parts[i]); err != nil {
			return key, cli.Usagef("--after: %s is not a place as a list shows it: %v", settings.Quote(text), err)
		}
	}
	return key, nil
}

func printList(w io.Writer, list listedEvents) error {
	const header = "ID\tRECEIVER\tSOURCE\tTYPE\tKEY\tSTATE\tATTEMPTS\tRECEIVED\tNEXT OR LAST\tLAST ERROR"
	err := output.List(w, "No event matches.", header, list.Events, func(e inboxops.Event) []any {
		when := e.ProcessedAt
		if e.State == inboxops.Pending {
			when = e.NextAttemptAt
		}
		return []any{e.InboxID, e.Receiver, e.Source, e.EventType, e.IdempotencyKey, e.State, e.Attempts, e.ReceivedAt, when, e.LastError}
	})
	if list.Next != 0 {
		fmt.Fprintf(w, "\nThere are more: repeat the command with --before %d.\n", list.Next)
	}
	return err
}

func printMemoryList(w io.Writer, list listedMemory) error {
	err := printMemory(w, list.Remembered)
	if list.Next != "" {
		fmt.Fprintf(w, "\nThere are more: repeat the command with %s\n", plain.ShellFlag("--after", list.Next))
	}
	return err
}

func printMemory(w io.Writer, list []inboxops.Memory) error {
	const header = "RECEIVER\tSOURCE\tKEY\tTYPE\tSTATE\tANSWER\tRECEIVED\tPROCESSED\tWHY"
	return output.List(w, "No event matches.", header, list, func(m inboxops.Memory) []any {
		answer := "-"
		if m.ResponseStatus != nil {
			answer = fmt.Sprint(*m.ResponseStatus)
		}
		return []any{m.Receiver, m.Source, m.IdempotencyKey, m.EventType, m.State, answer, m.ReceivedAt, m.ProcessedAt, m.LastError}
	})
}

type showCommand struct {
	senderFlags
	ID   int64  `arg:"" optional:"" name:"inbox-id" help:"The event's inbox id, as list shows it."`
	Key  string `placeholder:"KEY" help:"Instead of an id: the idempotency key, also of an event that only a middleware has processed."`
	JSON bool   `help:"Print JSON: {events, remembered, waits}. Fields are added, never renamed or removed."`
}

func (showCommand) Help() string {
	return `Shows everything that is stored of an event but its payload and the headers of its request, which this command never
reads.`
}

func (cmd showCommand) Run(inv *cli.Invocation) error {
	switch {
	case cmd.ID < 0:
		return cli.Usagef("%d is not an inbox id; they begin at 1", cmd.ID)
	case (cmd.ID == 0) == (cmd.Key == ""):
		return cli.Usagef("name one event: by its inbox id, or by --key")
	}
	return ask(inv, supportRole, func(ctx context.Context, _ *config.Config, ops *inboxops.Ops) error {
		shown, err := ops.Show(ctx, cmd.ID, inboxops.Selection{Receiver: cmd.Receiver, Source: cmd.Source, Key: cmd.Key})
		switch {
		case err != nil:
			return err
		case len(shown.Events) == 0 && len(shown.Remembered) == 0 && cmd.ID != 0:
			return fmt.Errorf("there is no event with inbox id %d: it was never recorded, or was pruned", cmd.ID)
		case len(shown.Events) == 0 && len(shown.Remembered) == 0:
			return fmt.Errorf("there is no event with key %s: it was never received, or was pruned", settings.Quote(cmd.Key))
		}
		shown.Events, shown.Remembered, shown.Waits = output.OrEmpty(shown.Events), output.OrEmpty(shown.Remembered), output.OrEmpty(shown.Waits)
		return output.Show(inv.Stdout, cmd.JSON, shown, printEvent)
	})
}

func printEvent(w io.Writer, shown inboxops.Shown) error {
	for _, e := range shown.Events {
		lines := [][]any{
			{"inbox id", e.InboxID},
			{"receiver", e.Receiver},
			{"source", e.Source},
			{"key", e.IdempotencyKey},
			{"type", fmt.Sprintf("%s, version %d", e.EventType, e.EventVersion)},
			{"state", fmt.Sprintf("%s after %d attempts and %d interruptions in a row", e.State, e.Attempts, e.Interruptions)},
			{"received", e.ReceivedAt},
			{"processed", e.ProcessedAt},
			{"next attempt", e.NextAttemptAt},
			{"last error", e.LastError},
			{"ordering key", e.OrderingKey},
			{"reference", e.RelatedReference},
			{"sender's id", e.EventID},
			{"sequence", e.Sequence},
			{"not after", e.NotAfter},
			{"claim", e.Claim},
			{"claimed by", e.ClaimedBy},
			{"claimed at", e.ClaimedAt},
		}
		lines = slices.DeleteFunc(lines, func(line []any) bool { return output.Cell(line[1]) == "" })
		if err := output.Table(w, "", "", lines, func(cells []any) []any { return cells }); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	if len(shown.Waits) > 0 {
		fmt.Fprintln(w, "Where it stands:")
		for _, wait := range shown.Waits {
			fmt.Fprintf(w, "  %d: %s\n", wait.InboxID, wait.Text)
		}
		fmt.Fprintln(w)
	}
	if len(shown.Remembered) > 0 {
		fmt.Fprintln(w, "Remembered:")
		if err := printMemory(w, shown.Remembered); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	_, err := fmt.Fprintln(w, "The payload and the headers of the request are not shown: this command never reads them.")
	return err
}
