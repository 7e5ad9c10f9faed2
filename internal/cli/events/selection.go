package events

import (
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/bulk"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

// selectionFlags choose deliveries by what stands in them.
type selectionFlags struct {
	IDs         []string `arg:"" optional:"" name:"event-id" help:"Events whose deliveries are meant; - reads them from standard input, one a line."`
	Destination string   `placeholder:"NAME" help:"Only deliveries to this destination."`
	Type        string   `placeholder:"PATTERN" help:"Only events of these types; * stands for any characters."`
	Reason      string   `placeholder:"REASON" help:"Only deliveries whose last attempt ended so: rejected, timeout, …"`
	OrderingKey string   `placeholder:"KEY" help:"Only events with this ordering key."`
	bulk.TimeFlags
	Limit *int64 `placeholder:"N" help:"At most so many deliveries."`
	bulk.Flags
}

// selection returns what was asked for, but for its times. statuses and parked come from the command's own flags.
func (f selectionFlags) selection(inv *cli.Invocation, statuses []string, parked bool) (s ops.Selection, err error) {
	s = ops.Selection{
		Destination: f.Destination, Parked: parked, Statuses: statuses, Type: f.Type, Reason: f.Reason, OrderingKey: f.OrderingKey,
	}
	if f.Limit != nil {
		if s.Limit = *f.Limit; s.Limit < 1 {
			return s, cli.Usagef("--limit: %d is out of range; write 1 or more", s.Limit)
		}
	}
	if err := f.Check(); err != nil {
		return s, err
	}
	s.EventIDs, err = f.ReadIDs(f.IDs, inv.Stdin, s.Empty() && f.Since == "" && f.Until == "",
		"nothing says which deliveries are meant; name events, or narrow it with --destination, --status, --type, --reason, --ordering-key, --since or --until")
	return s, err
}

// describe repeats the selection in an audit line: every flag, but only the number of named events.
func (f selectionFlags) describe(s ops.Selection) string {
	text := bulk.FlagText{}
	text.AddIDs("event", "events", s.EventIDs)
	text.Add("destination", s.Destination)
	text.Add("status", strings.Join(s.Statuses, ","))
	if s.Parked {
		text = append(text, "--parked")
	}
	text.Add("type", s.Type)
	text.Add("reason", s.Reason)
	text.Add("ordering-key", s.OrderingKey)
	text.Add("since", f.Since)
	text.Add("until", f.Until)
	text.Add("limit", s.Limit)
	return strings.Join(text, " ")
}
