package control

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// maxPage is how many deliveries or destinations one page holds at most.
const maxPage = 500

// FilterNames are the parameters of a filter.
func FilterNames() []string {
	return []string{"status", "destination", "type", "reason", "key", "ordering_key", "related", "since", "until", "after", "limit"}
}

// Filter reads which deliveries to list from the parameters of a request. status also takes parked.
// A destination that is not known is an error with a suggestion, because an empty list would look
// like success. Errors are [check.Problem].
func (c *Control) Filter(ctx context.Context, q url.Values) (f ops.DeliveryFilter, err error) {
	f = ops.DeliveryFilter{
		Status: q.Get("status"), Destination: q.Get("destination"), Type: q.Get("type"), Reason: q.Get("reason"), Key: q.Get("key"),
		OrderingKey: q.Get("ordering_key"), Related: q.Get("related"),
	}
	if f.Status == "parked" {
		f.Status, f.Parked = "pending", true
		if f.Destination != "" {
			return f, check.Problem{Path: "destination", Text: "cannot be combined with status parked: what is parked has no destination"}
		}
	}
	if !slices.Contains([]string{"", "pending", "delivered", "failed", "discarded"}, f.Status) {
		return f, check.Problem{Path: "status", Text: fmt.Sprintf("%q is not known; choose pending, parked, delivered, failed or discarded", f.Status)}
	}
	for name, value := range q {
		if strings.ContainsRune(strings.Join(value, ""), 0) {
			return f, check.Problem{Path: name, Text: "contains a NUL"}
		}
	}
	if prefix, cut := strings.CutSuffix(f.Key, "*"); cut {
		if f.EventIDs, err = c.eventsOf(ctx, prefix); err != nil {
			return f, err
		}
		f.Key = ""
	}
	if f.Since, f.Until, err = c.bounds(ctx, q); err != nil {
		return f, err
	}
	if f.After, err = parsePosition(q.Get("after")); err != nil {
		return f, err
	}
	if f.Limit, err = ParseLimit(q); err != nil {
		return f, err
	}
	if f.Destination == "" {
		return f, nil
	}
	return f, c.known(ctx, f.Destination)
}

// maxOfPrefix is how many events a prefix of their idempotency keys may name.
const maxOfPrefix = 1000

// eventsOf returns the events whose idempotency key begins with a prefix.
func (c *Control) eventsOf(ctx context.Context, prefix string) ([]int64, error) {
	ids, err := c.Outbox.EventsOfPrefix(ctx, prefix, maxOfPrefix+1)
	switch {
	case err != nil:
		return nil, err
	case len(ids) == 0:
		return nil, check.Problem{Path: "key", Text: fmt.Sprintf("no idempotency key begins with %q", prefix)}
	case len(ids) > maxOfPrefix:
		return nil, check.Problem{Path: "key", Text: fmt.Sprintf("more than %d idempotency keys begin with %q; write more of it", maxOfPrefix, prefix)}
	}
	return ids, nil
}

// Deliveries lists what a filter matches. If that is nothing, and the filter has a name that
// nothing has, the error says so.
func (c *Control) Deliveries(ctx context.Context, f ops.DeliveryFilter) (ops.DeliveryPage, error) {
	page, err := c.Outbox.Deliveries(ctx, f)
	if err == nil && len(page.Deliveries) == 0 && page.Next == nil && f.After.EventID == 0 {
		err = c.refuseUnknown(ctx, "", ops.Selection{Destination: f.Destination, Reason: f.Reason, Type: f.Type})
	}
	return page, err
}

// Selection reads what a bulk operation shall change from a form. Its fields are those of a filter,
// and ids.
func (c *Control) Selection(ctx context.Context, q url.Values) (s ops.Selection, err error) {
	f, err := c.Filter(ctx, q)
	if err != nil {
		return s, err
	}
	s = ops.Selection{Destination: f.Destination, Parked: f.Parked, Type: f.Type, Since: f.Since, Until: f.Until, Reason: f.Reason, OrderingKey: f.OrderingKey}
	if f.Status != "" {
		s.Statuses = []string{f.Status}
	}
	if f.Related != "" {
		return s, check.Problem{Path: "related", Text: "cannot be acted on as a whole: list the events, and name those that are meant"}
	}
	if text := q.Get("rate"); text != "" {
		rate, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return s, check.Problem{Path: "rate", Text: fmt.Sprintf("%q is not a number of deliveries a second", text)}
		}
		s.Rate = &rate
	}
	s.EventIDs = f.EventIDs
	for _, text := range q["id"] {
		id, err := strconv.ParseInt(text, 10, 64)
		if err != nil || id < 1 {
			return s, check.Problem{Path: "id", Text: fmt.Sprintf("%q is not the id of an event", text)}
		}
		s.EventIDs = append(s.EventIDs, id)
	}
	if f.Key != "" { // a selection has no key: one event is named by its id
		list, err := c.Outbox.Deliveries(ctx, ops.DeliveryFilter{Key: f.Key, Limit: 1})
		switch {
		case err != nil:
			return s, err
		case len(list.Deliveries) == 0:
			return s, check.Problem{Path: "key", Text: fmt.Sprintf("no event has the idempotency key %q", f.Key)}
		}
		s.EventIDs = append(s.EventIDs, list.Deliveries[0].EventID)
	}
	return s, nil
}

// ParseID reads a number that names something. path is the parameter, for the error.
func ParseID(path, text string) (int64, error) {
	id, err := strconv.ParseInt(text, 10, 64)
	if err != nil || id < 1 {
		return 0, check.Problem{Path: path, Text: "is not a number above 0"}
	}
	return id, nil
}

func (c *Control) known(ctx context.Context, destination string) error {
	names, err := c.Outbox.Destinations(ctx)
	if err != nil || slices.Contains(names, destination) {
		return err
	}
	return problemOf("", ops.Unknown{What: "destination", Name: destination, Known: names})
}

// refuseUnknown returns a mistake in a selection that matches nothing: nothing to do would look
// like success.
func (c *Control) refuseUnknown(ctx context.Context, path string, s ops.Selection) error {
	unknown, err := c.Outbox.UnknownNames(ctx, s.Destination, s.Reason, s.Type)
	if err != nil || len(unknown) == 0 {
		return err
	}
	return problemOf(path, unknown[0])
}

// problemOf says which name is not known, and which was probably meant.
func problemOf(path string, u ops.Unknown) check.Problem {
	text := fmt.Sprintf("there is no %s %q%s", u.What, u.Name, settings.DidYouMean(u.Name, u.Known))
	return check.Problem{Path: path + u.What, Text: text}
}

// bounds reads since and until: a time, or how long ago by the clock of the database.
func (c *Control) bounds(ctx context.Context, q url.Values) (since, until time.Time, err error) {
	var now time.Time
	for name, bound := range map[string]*time.Time{"since": &since, "until": &until} {
		text := q.Get(name)
		if text == "" {
			continue
		}
		// In an address a plus sign is a blank: 2026-01-02T15:04:05+02:00 arrives without it.
		if *bound, err = time.Parse(time.RFC3339, strings.Replace(text, " ", "+", 1)); err == nil {
			continue
		}
		ago, durationErr := time.ParseDuration(text)
		if durationErr != nil || ago < 0 {
			return since, until, check.Problem{Path: name, Text: fmt.Sprintf("%q is neither a time such as 2026-01-02T15:04:05Z nor how long ago, such as 2h", text)}
		}
		if now.IsZero() {
			if now, err = c.Outbox.Now(ctx); err != nil {
				return since, until, err
			}
		}
		*bound = now.Add(-ago)
	}
	return since, until, nil
}

// parsePosition reads the parameter after. An empty one is the zero value.
func parsePosition(text string) (ops.DeliveryPosition, error) {
	if text == "" {
		return ops.DeliveryPosition{}, nil
	}
	position, good := ops.ParsePosition(text)
	if !good {
		return position, check.Problem{Path: "after", Text: "is not a position that a list has given; leave it out for the first page"}
	}
	return position, nil
}
