package events

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/bulk"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// selectionFlags choose deliveries by what stands in them.
type selectionFlags struct {
	IDs         []string `arg:"" optional:"" name:"event-id" help:"Events whose deliveries are meant, by id, idempotency key or related reference; - reads ids from standard input, one a line."`
	Destination string   `placeholder:"NAME" help:"Only deliveries to this destination."`
	Type        string   `placeholder:"PATTERN" help:"Only events of these types; * stands for any characters."`
	Reason      string   `placeholder:"REASON" help:"Only deliveries whose last attempt ended so: rejected, timeout, …"`
	Key         string   `placeholder:"KEY" help:"Only the event with this idempotency key."`
	OrderingKey string   `placeholder:"KEY" help:"Only events with this ordering key."`
	bulk.TimeFlags
	Limit *int64 `placeholder:"N" help:"At most so many deliveries."`
	bulk.Flags
}

// selection returns what was asked for, but for its times. statuses and parked come from the
// command's own flags.
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
	ids, names := f.split()
	if f.Key != "" && len(f.IDs) > 0 {
		return s, cli.Usagef("--key names an event; name no others beside it")
	}
	s.EventIDs, err = f.ReadIDs(ids, inv.Stdin, len(names) == 0 && s.Empty() && f.Key+f.Since+f.Until == "",
		"nothing says which deliveries are meant; name events, or narrow it with --destination, --status, --type, --reason, --key, --ordering-key, --since or --until")
	return s, err
}

// split returns the arguments that are ids, and those that can only be a key or a reference. What
// has digits alone is an id.
func (f selectionFlags) split() (ids, names []string) {
	for _, text := range f.IDs {
		if strings.HasPrefix(text, "-") || strings.Trim(text, "0123456789") == "" || slices.Contains(f.IDs, "-") {
			ids = append(ids, text)
		} else {
			names = append(names, text)
		}
	}
	return ids, names
}

// named returns the ids of the events that --key names, or the arguments by a key or a reference.
func (f selectionFlags) named(ctx context.Context, outbox *ops.Outbox) (ids []int64, err error) {
	if f.Key != "" {
		if ids, err = outbox.EventsOfKey(ctx, f.Key); err == nil && len(ids) == 0 {
			err = fmt.Errorf("no event has the idempotency key %q", plain.Clip(f.Key))
		}
		return ids, err
	}
	_, names := f.split()
	for _, name := range names {
		id, err := eventArg{name}.find(ctx, outbox)
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, nil
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
	text.Add("key", f.Key)
	text.Add("ordering-key", s.OrderingKey)
	text.Add("since", f.Since)
	text.Add("until", f.Until)
	text.Add("limit", s.Limit)
	if s.Rate != nil {
		text = append(text, fmt.Sprint("--rate ", *s.Rate))
	}
	return strings.Join(text, " ")
}
