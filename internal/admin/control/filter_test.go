package control

import (
	"net/url"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// newControl returns a Control over a database, in which no operation can start.
func newControl(db *relaytest.Database) *Control {
	return New(Config{Outbox: ops.New(db.Pool), History: history.New()})
}

// form reads the parameters of an address.
func form(t *testing.T, text string) url.Values {
	t.Helper()
	q, err := url.ParseQuery(text)
	relaytest.Must(t, err)
	return q
}

// A mistake in a filter names its parameter and says what to write.
func TestMistakesInAFilter(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "logistics")
	c := newControl(db)
	for text, want := range map[string]string{
		"destination=logistic":                `destination: there is no destination "logistic"; did you mean "logistics"?`,
		"destination=shop":                    `destination: there is no destination "shop"`,
		"reason=timeuot":                      `reason: there is no reason "timeuot"; did you mean "timeout"?`,
		"type=invoice.piad":                   `type: there is no type "invoice.piad"`,
		"status=broken":                       `status: "broken" is not known; choose pending, parked, delivered, failed or discarded`,
		"status=parked&destination=logistics": "destination: cannot be combined with status parked: what is parked has no destination",
		"since=yesterday":                     `since: "yesterday" is neither a time such as 2026-01-02T15:04:05Z nor how long ago, such as 2h`,
		"until=-2h":                           `until: "-2h" is neither a time such as 2026-01-02T15:04:05Z nor how long ago, such as 2h`,
		"after=x":                             "after: is not a position that a list has given; leave it out for the first page",
		"limit=9999":                          `limit: "9999" is not a number from 1 to 500`,
		"limit=0":                             `limit: "0" is not a number from 1 to 500`,
		"type=%00":                            "type: contains a NUL",
	} {
		f, err := c.Filter(t.Context(), form(t, text))
		if err == nil {
			f.Limit = 10
			_, err = c.Deliveries(t.Context(), f)
		}
		if err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
		if p, unexpected := ProblemOf(err); p.Status != 422 || p.Detail != want || unexpected {
			t.Errorf("%s: %+v", text, p)
		}
	}
}

// Each parameter narrows the list, in combination with the others too.
func TestFilter(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "logistics")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, related_reference)
		SELECT 'type.' || i % 2, '{}', 'k' || i, CASE WHEN i = 3 THEN 'o' END, CASE WHEN i = 4 THEN 'ref' END FROM generate_series(1, 5) i`)
	db.Settled("failed", "event_id <= 2")
	c := newControl(db)
	list := func(text string) string {
		t.Helper()
		f, err := c.Filter(t.Context(), form(t, text))
		relaytest.Must(t, err)
		if f.Limit == 0 {
			f.Limit = 10
		}
		page, err := c.Deliveries(t.Context(), f)
		relaytest.Must(t, err)
		var ids strings.Builder
		for _, d := range page.Deliveries {
			ids.WriteByte(byte('0' + d.EventID))
		}
		return ids.String()
	}
	now := relaytest.Row[time.Time](db, "SELECT now()")
	for text, want := range map[string]string{
		"":                 "54321",
		"status=failed":    "21",
		"status=parked":    "",
		"type=type.1":      "531",
		"key=k2":           "2",
		"ordering_key=o":   "3",
		"related=ref":      "4",
		"since=1h&limit=2": "54",
		"until=1h":         "",
		"since=2026-01-02T15:04:05+02:00&destination=logistics":             "54321",
		"since=" + url.QueryEscape(now.Add(time.Hour).Format(time.RFC3339)): "",
		"status=failed&type=type.1&destination=logistics":                   "1",
	} {
		if got := list(text); got != want {
			t.Errorf("%s lists %q, want %q", text, got, want)
		}
	}
	for _, name := range FilterNames() {
		f, err := c.Filter(t.Context(), url.Values{name: {""}})
		if err != nil || !reflect.DeepEqual(f, ops.DeliveryFilter{}) {
			t.Errorf("an empty %s: %+v, %v", name, f, err)
		}
	}
}

// The fields of a form choose what a bulk operation changes.
func TestSelection(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "logistics")
	db.Insert(3, "k")
	c := newControl(db)
	s, err := c.Selection(t.Context(), form(t, "status=failed&destination=logistics&type=in*&reason=timeout&ordering_key=o&rate=7&id=2&id=3"))
	if err != nil || s.Destination != "logistics" || !slices.Equal(s.Statuses, []string{"failed"}) || s.Type != "in*" || s.Reason != "timeout" || s.OrderingKey != "o" ||
		s.Rate == nil || *s.Rate != 7 || !slices.Equal(s.EventIDs, []int64{2, 3}) {
		t.Errorf("%+v, %v", s, err)
	}
	key := relaytest.Row[string](db, "SELECT idempotency_key FROM outbox WHERE id = 2")
	if s, err := c.Selection(t.Context(), url.Values{"key": {key}}); err != nil || !slices.Equal(s.EventIDs, []int64{2}) {
		t.Errorf("%+v, %v", s, err)
	}
	if s, err := c.Selection(t.Context(), form(t, "status=parked")); err != nil || !s.Parked {
		t.Errorf("%+v, %v", s, err)
	}
	for text, want := range map[string]string{
		"related=ref": "related: cannot be acted on as a whole: list the events, and name those that are meant",
		"rate=fast":   `rate: "fast" is not a number of deliveries a second`,
		"id=0":        `id: "0" is not the id of an event`,
		"id=x":        `id: "x" is not the id of an event`,
		"key=none":    `key: no event has the idempotency key "none"`,
		"limit=x":     `limit: "x" is not a number from 1 to 500`,
	} {
		if _, err := c.Selection(t.Context(), form(t, text)); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}
