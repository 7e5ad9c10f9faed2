package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestRouterFindsTheMostSpecificHandler(t *testing.T) {
	t.Parallel()
	var called string
	named := func(name string) consumer.Handler[pgx.Tx] {
		return func(context.Context, pgx.Tx, consumer.Event) error { called = name; return nil }
	}
	r := consumer.NewRouter()
	routes := []struct {
		pattern string
		version int
	}{
		{"*", 0},
		{"*", 7},
		{"invoice.*", 0},
		{"invoice.*", 2},
		{"*.paid", 0},
		{"invoice.p*", 0},
		{"invoice.paid", 0},
		{"invoice.paid", 3},
		{"shipment.sent", 1},
		{"100%*", 0},
	}
	for _, route := range routes {
		r.Handle(route.pattern, route.version, named(fmt.Sprintf("%s %d", route.pattern, route.version)))
	}
	r.Fallback(named("fallback"))
	cases := []struct {
		eventType string
		version   int
		want      string
	}{
		{"invoice.paid", 3, "invoice.paid 3"},
		{"invoice.paid", 2, "invoice.paid 0"}, // before "invoice.*" version 2: its type is exact
		{"invoice.posted", 2, "invoice.p* 0"}, // before the shorter pattern, whatever its version
		{"invoice.created", 2, "invoice.* 2"},
		{"invoice.created", 1, "invoice.* 0"},
		{"invoice.", 1, "invoice.* 0"},
		{"order.paid", 1, "*.paid 0"},
		{"shipment.sent", 1, "shipment.sent 1"},
		{"shipment.sent", 2, "* 0"}, // a version without a handler is not the exact type's
		{"shipment.sent", 7, "* 7"},
		{"100%off", 1, "100%* 0"},
		{"100xoff", 1, "* 0"},
		{"INVOICE.paid", 1, "*.paid 0"},
		{"", 1, "fallback"},
	}
	for _, c := range cases {
		called = ""
		if err := r.Dispatch(t.Context(), nil, consumer.Event{Type: c.eventType, Version: c.version}); err != nil || called != c.want {
			t.Errorf("%q version %d went to %q (%v), want %q", c.eventType, c.version, called, err, c.want)
		}
	}
}

func TestRouterWithoutAHandler(t *testing.T) {
	t.Parallel()
	r := consumer.NewRouter()
	r.Handle("invoice.paid", 1, func(context.Context, pgx.Tx, consumer.Event) error { return nil })
	for text, event := range map[string]consumer.Event{
		"no handler for invoice.paid version 3":    {Type: "invoice.paid", Version: 3},
		"no handler for order.paid version 1":      {Type: "order.paid", Version: 1},
		"no handler for an event without a type":   {Version: 1, Foreign: true},
		"no handler for an event without a type\n": {},
	} {
		err := r.Dispatch(t.Context(), nil, event)
		if !errors.Is(err, consumer.ErrUnknownEvent) || err.Error() != strings.TrimSpace(text) {
			t.Errorf("got %v, want %s", err, text)
		}
	}
	testkit.ErrorIs(t, "the zero router", (&consumer.Router[pgx.Tx]{}).Dispatch(t.Context(), nil, consumer.Event{Type: "a"}), consumer.ErrUnknownEvent)
}

func TestRouterRefusesMistakes(t *testing.T) {
	t.Parallel()
	nothing := func(context.Context, pgx.Tx, consumer.Event) error { return nil }
	handle := func(pattern string, version int) func(*consumer.Router[pgx.Tx]) {
		return func(r *consumer.Router[pgx.Tx]) { r.Handle(pattern, version, nothing) }
	}
	dispatch := func(r *consumer.Router[pgx.Tx]) { _ = r.Dispatch(context.Background(), nil, consumer.Event{}) }
	fallback := func(r *consumer.Router[pgx.Tx]) { r.Fallback(nothing) }
	cases := map[string]struct {
		steps []func(*consumer.Router[pgx.Tx])
		want  string
	}{
		"empty":              {[]func(*consumer.Router[pgx.Tx]){handle("", 0)}, "printable"},
		"blank":              {[]func(*consumer.Router[pgx.Tx]){handle("invoice paid", 0)}, "printable"},
		"not ASCII":          {[]func(*consumer.Router[pgx.Tx]){handle("größe", 0)}, "printable"},
		"too long":           {[]func(*consumer.Router[pgx.Tx]){handle(strings.Repeat("a", 256), 0)}, "255"},
		"negative":           {[]func(*consumer.Router[pgx.Tx]){handle("a", -1)}, "negative"},
		"twice":              {[]func(*consumer.Router[pgx.Tx]){handle("a", 1), handle("a", 0), handle("a", 1)}, `"a" version 1 has two handlers`},
		"glob twice":         {[]func(*consumer.Router[pgx.Tx]){handle("a*", 0), handle("a*", 0)}, `"a*", any version has two handlers`},
		"ambiguous":          {[]func(*consumer.Router[pgx.Tx]){handle("a*", 2), handle("*b", 2)}, "equal right"},
		"the same otherwise": {[]func(*consumer.Router[pgx.Tx]){handle("a*", 0), handle("a**", 0)}, "equal right"},
		"two fallbacks":      {[]func(*consumer.Router[pgx.Tx]){fallback, fallback}, "Fallback has two handlers"},
		"nil":                {[]func(*consumer.Router[pgx.Tx]){func(r *consumer.Router[pgx.Tx]) { r.Handle("a", 0, nil) }}, "is nil"},
		"nil fallback":       {[]func(*consumer.Router[pgx.Tx]){func(r *consumer.Router[pgx.Tx]) { r.Fallback(nil) }}, "is nil"},
		"nil JSON": {[]func(*consumer.Router[pgx.Tx]){func(r *consumer.Router[pgx.Tx]) {
			consumer.HandleJSON[int](r, "a", 0, nil)
		}}, "is nil"},
		"late":          {[]func(*consumer.Router[pgx.Tx]){dispatch, handle("a", 0)}, "after the first event"},
		"late fallback": {[]func(*consumer.Router[pgx.Tx]){dispatch, fallback}, "after the first event"},
		"unambiguous": {[]func(*consumer.Router[pgx.Tx]){
			handle("a*", 1), handle("*b", 2), handle("*c", 0), handle("b*", 1), handle("ab*", 1), handle("ab", 1), handle("*", 0), handle("*", 1), fallback,
		}, ""},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			defer func() {
				caught := fmt.Sprint(recover())
				if c.want == "" && caught != "<nil>" || !strings.Contains(caught, c.want) {
					t.Errorf("panicked with %q, want %q", caught, c.want)
				}
			}()
			r := consumer.NewRouter()
			for _, step := range c.steps {
				step(r)
			}
		})
	}
}

func TestRouterIsUsedConcurrently(t *testing.T) {
	t.Parallel()
	r := consumer.NewRouter()
	r.Handle("a", 0, func(_ context.Context, _ pgx.Tx, event consumer.Event) error {
		return errors.New(string(event.Payload))
	})
	r.Handle("b*", 0, func(context.Context, pgx.Tx, consumer.Event) error { return nil })
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for n := range 1000 {
				want := fmt.Sprint(i, n)
				if err := r.Dispatch(t.Context(), nil, consumer.Event{Type: "a", Version: n, Payload: []byte(want)}); err == nil || err.Error() != want {
					t.Errorf("got %v, want %s", err, want)
				}
				if err := r.Dispatch(t.Context(), nil, consumer.Event{Type: "bc"}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

// Not in parallel with anything, because allocations are counted for the whole process.
func TestRouterAllocatesNothing(t *testing.T) {
	r := consumer.NewRouter()
	r.Handle("a", 0, func(context.Context, pgx.Tx, consumer.Event) error { return nil })
	r.Handle("b*", 0, func(context.Context, pgx.Tx, consumer.Event) error { return nil })
	for _, event := range []consumer.Event{{Type: "a", Version: 1}, {Type: "bc", Version: 1}} {
		if n := testing.AllocsPerRun(100, func() { _ = r.Dispatch(t.Context(), nil, event) }); n > 0 {
			t.Errorf("%v allocations for each %s", n, event.Type)
		}
	}
}

type invoice struct {
	Number string  `json:"number"`
	Amount int64   `json:"amount"`
	Lines  []line  `json:"lines"`
	Due    *string `json:"due"`
}

type line struct {
	Article string `json:"article"`
	Count   int    `json:"count"`
}

type guarded struct{}

func (*guarded) UnmarshalJSON(b []byte) error { return fmt.Errorf("cannot use %s", b) }

func TestHandleJSON(t *testing.T) {
	t.Parallel()
	const canary = "4711canary"
	r := consumer.NewRouter()
	ran := false
	consumer.HandleJSON(r, "invoice.*", 0, func(_ context.Context, _ pgx.Tx, event consumer.Event, _ invoice) error {
		ran = event.IdempotencyKey == "k"
		return nil
	})
	for _, c := range []struct {
		payload string
		want    string // what the error holds; empty: none
	}{
		{`{"number":"1","amount":2,"lines":[{"article":"a","count":3}],"due":null}`, ""},
		{" {}\n", ""},
		{`{"new":"` + canary + `"}`, ""},
		{`{"number":"` + canary + `"} {}`, "mistake at byte 25"},
		{`{}` + canary, "mistake at byte 3"},
		{`{"number":` + canary + `}`, "not JSON"},
		{``, "not JSON"},
		{`null`, "payload is null"},
		{"\n null ", "payload is null"},
		{`"` + canary + `"`, "a JSON string at byte 12 does not fit"},
		{`{"amount":"` + canary + `"}`, `field "amount": a JSON string at byte`},
		{`{"amount":4711.5}`, `field "amount": a JSON number at byte`},
		{`{"amount":99999999999999999999}`, `field "amount"`},
		{`{"lines":[{"count":true}]}`, `field "lines.count": a JSON bool`},
	} {
		ran = false
		err := r.Dispatch(t.Context(), nil, consumer.Event{IdempotencyKey: "k", Type: "invoice.paid", Payload: []byte(c.payload)})
		switch {
		case c.want == "" && (err != nil || !ran):
			t.Errorf("%s: %v", c.payload, err)
		case c.want != "" && (err == nil || ran || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: got %v, want %s", c.payload, err, c.want)
		case err != nil && (strings.Contains(err.Error(), "4711") || strings.Contains(err.Error(), "99999")):
			t.Errorf("%s: the error repeats a value: %v", c.payload, err)
		}
	}

	others := consumer.NewRouter()
	consumer.HandleJSON(others, "guarded", 0, func(context.Context, pgx.Tx, consumer.Event, guarded) error { return nil })
	consumer.HandleJSON(others, "pointer", 0, func(_ context.Context, _ pgx.Tx, _ consumer.Event, p *invoice) error {
		if p != nil {
			return errors.New("not nil")
		}
		return nil
	})
	if err := others.Dispatch(t.Context(), nil, consumer.Event{Type: "guarded", Payload: []byte(`"` + canary + `"`)}); err == nil || strings.Contains(err.Error(), canary) {
		t.Errorf("got %v", err)
	}
	if err := others.Dispatch(t.Context(), nil, consumer.Event{Type: "pointer", Payload: []byte(`null`)}); err != nil {
		t.Error(err)
	}
}
