package control

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// run lets operations start until the test ends.
func run(t *testing.T, c *Control) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx) })
	t.Cleanup(func() {
		stop()
		running.Wait()
	})
	relaytest.Eventually(t, "the start", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.base != nil
	})
}

// An order that means nothing, or another thing than was meant, is refused before anything is
// counted.
func TestMistakesInAnOrder(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "logistics")
	c := newControl(db)
	negative, five := int64(-1), int64(5)
	type sel = ops.Selection
	for want, order := range map[string]ops.Order{
		"action: is not known; write replay, retry or discard":                                 {Action: "drop", Selection: sel{Parked: true}},
		"selection.limit: is below 0; leave it out for no limit":                               {Action: "replay", Selection: sel{Destination: "logistics", Limit: -1}},
		"selection.rate: is below 0; write 0 for no limit":                                     {Action: "replay", Selection: sel{EventIDs: []int64{1}, Rate: &negative}},
		"selection.rate: belongs to a replay; leave it out":                                    {Action: "discard", Selection: sel{EventIDs: []int64{1}, Rate: &five}},
		"selection: names nothing; give events":                                                {Action: "replay", Selection: sel{Rate: &five}},
		"selection.parked: can only be discarded":                                              {Action: "replay", Selection: sel{Parked: true}},
		`selection.statuses: "pending" cannot be chosen for replay; choose`:                    {Action: "replay", Selection: sel{Statuses: []string{"pending"}}},
		`selection.statuses: "delivered" cannot be chosen for discard`:                         {Action: "discard", Selection: sel{Statuses: []string{"failed", "delivered"}}},
		`selection.destination: there is no destination "logistic"; did you mean "logistics"?`: {Action: "replay", Selection: sel{Destination: "logistic"}},
		`selection.reason: there is no reason "unautorized"; did you mean "unauthorized"?`:     {Action: "retry", Selection: sel{Reason: "unautorized"}},
	} {
		_, err := c.Preview(t.Context(), order)
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%+v: %v, want %s", order, err, want)
		}
		if p, unexpected := ProblemOf(err); p.Status != http.StatusUnprocessableEntity || unexpected {
			t.Errorf("%v: %+v", err, p)
		}
		if strings.Contains(want, "there is no") {
			continue
		}
		if _, err := c.Start(t.Context(), ops.Actor{Name: "ann"}, order, ""); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("it was started: %v", err)
		}
	}
	_, err := c.Preview(t.Context(), ops.Order{Action: "replay", Selection: sel{Type: "\x00"}})
	if p, unexpected := ProblemOf(err); p.Status != http.StatusUnprocessableEntity || unexpected {
		t.Errorf("a NUL: %+v", p)
	}
}

// The start of an order needs the preview of this very order, with what it counted.
func TestSecurityOrdersNeedTheirPreview(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(4, "k")
	db.Settled("failed", "true")
	c := newControl(db)
	run(t, c)
	preview, err := c.Preview(t.Context(), ops.Order{Action: "discard", Selection: ops.Selection{EventIDs: []int64{1, 2}}})
	relaytest.Must(t, err)
	for name, change := range map[string]func(order *ops.Order, token *string){
		"no token":          func(_ *ops.Order, token *string) { *token = "" },
		"half a token":      func(_ *ops.Order, token *string) { *token = (*token)[:20] },
		"another selection": func(order *ops.Order, _ *string) { order.Selection.EventIDs = []int64{1, 2, 3} },
		"a wider one":       func(order *ops.Order, _ *string) { order.Selection = ops.Selection{Destination: "default"} },
		"another action":    func(order *ops.Order, _ *string) { order.Action = "replay" },
		"another count":     func(order *ops.Order, _ *string) { order.Matched = 4 },
	} {
		order, token := preview.Order, preview.Token
		change(&order, &token)
		if _, err := c.Start(t.Context(), ops.Actor{Name: "ann"}, order, token); !errors.Is(err, ErrNotConfirmed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := newControl(db).Start(t.Context(), ops.Actor{Name: "ann"}, preview.Order, preview.Token); !errors.Is(err, ErrNotConfirmed) {
		t.Errorf("on another relay: %v", err)
	}
	testkit.Equal(t, "operations recorded", relaytest.Row[int](db, `SELECT count(*) FROM outbox_audit`), 0)
}

// An operation whose process was killed continues, once, until it is interrupted or done.
func TestKilledOperationGoesOn(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(5, "k")
	db.Settled("failed", "true")
	db.Exec(`INSERT INTO outbox_audit (actor, origin, action, state, selection, matched, done, updated_at)
		VALUES ('rob', 'page', 'replay', 'running', '{"destination": "default", "seen_at": "2100-01-01T00:00:00Z", "seen_event": "5"}', 8, 3, now() - interval '5 minutes')`)
	// Its batch waits until the test lets it go.
	gate := db.Hold("UPDATE OF done ON outbox_audit", "NEW.done > OLD.done")
	c := newControl(db)
	ann := ops.Actor{Name: "ann", Origin: ops.OriginPage}
	testkit.ErrorIs(t, "before Run", c.Resume(t.Context(), ann, 1), ErrBusy)
	run(t, c)
	relaytest.Must(t, c.Resume(t.Context(), ann, 1))
	testkit.ErrorIs(t, "it was resumed a second time", c.Resume(t.Context(), ann, 1), ops.ErrNotResumable)
	testkit.ErrorIs(t, "an operation that is none", c.Resume(t.Context(), ann, 77), ops.ErrNoAuditEntry)
	relaytest.Becomes(db, true, `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 4471 AND NOT granted
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))`)
	relaytest.Must(t, c.Interrupt(t.Context(), ann, 1))
	relaytest.Must(t, gate.Rollback(t.Context()))
	relaytest.Eventually(t, "its end", func() bool { return !c.Runs(1) })
	if got := relaytest.Row[string](db, `SELECT string_agg(actor || ' ' || origin || ' ' || action, ', ' ORDER BY id) FROM outbox_audit`); got != "rob page replay, ann page resume_operation, ann page interrupt_operation" {
		t.Error(got)
	}
	testkit.Equal(t, "found", relaytest.Row[string](db, `SELECT state || ' ' || done FROM outbox_audit WHERE id = 1`), "interrupted 8")
}

// The first page counts what waits and who works, and shows each destination in a word.
func TestOverview(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t, "logistics", "shop")
	db.Insert(3, "k")
	db.Insert(1, "parked")
	db.Exec(`DELETE FROM outbox_delivery WHERE event_id = 4 AND destination = 'shop'; UPDATE outbox_delivery SET destination = '' WHERE event_id = 4`)
	db.Settled("failed", "event_id = 1 AND destination = 'shop'")
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 hour' WHERE event_id = 2`)
	db.Exec(`INSERT INTO outbox_relay (name, version) VALUES ('r1', '1'); INSERT INTO outbox_alert (rule, subject) VALUES ('failed', 'shop')`)
	c := newControl(db)
	o, err := c.Overview(t.Context(), List{})
	if err != nil || o.Backlog != 5 || o.Parked != 1 || o.Failed != 1 || o.LagSeconds < 3600 || o.Relays != 1 || o.Alerts != 1 || len(o.Destinations) != 2 || len(o.Advice) == 0 {
		t.Errorf("%+v, %v", o, err)
	}
	d, advice, err := c.Destination(t.Context(), "shop")
	if err != nil || d.Pending != 2 || d.Failed != 1 || d.State == "" || d.Concurrency != nil {
		t.Errorf("%+v, %v", d, err)
	}
	for _, a := range advice {
		testkit.Equal(t, "advice about", a.Subject, "shop")
	}
	// A destination may be younger than the status that was read last.
	db.Exec(`INSERT INTO outbox_route (pattern, destination) VALUES ('*', 'late')`)
	if d, _, err := c.Destination(t.Context(), "late"); err != nil || d.Destination != "late" {
		t.Errorf("%+v, %v", d, err)
	}
	if _, _, err := c.Destination(t.Context(), "nowhere"); !errors.Is(err, ops.ErrUnknownDestination) {
		t.Error(err)
	}
}

// The last hour is shown of each listed destination, and orders all of them.
func TestLastHourOfManyDestinations(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_route (pattern, destination) SELECT 't' || i, 'd' || to_char(i, 'FM000') FROM generate_series(0, 998) i;
		INSERT INTO outbox_history (step, destination, at, event_type, delivered, failed, retried, probes, took, latency)
		VALUES (1, 'd900', now(), '', 7, 0, 0, 0, '{}', '{}'), (1, 'd400', now(), '', 3, 0, 0, 0, '{}', '{}')`)
	c := newControl(db)
	c.History = history.New()
	c.History.Attempted(history.Key{Destination: "d500", EventType: "t"}, policy.Delivered, time.Millisecond, time.Millisecond) // not written yet
	for _, test := range []struct {
		list      List
		delivered []int64
	}{
		{List{Prefix: "d900"}, []int64{7}},
		{List{Sort: "delivered", Limit: 3}, []int64{7, 3, 1}},
		{List{Sort: "delivered", Limit: 3, After: "d900"}, []int64{3, 1, 0}},
	} {
		o, err := c.Overview(t.Context(), test.list)
		relaytest.Must(t, err)
		var got []int64
		for _, d := range o.Destinations {
			got = append(got, d.LastHour.Delivered)
		}
		if !slices.Equal(got, test.delivered) {
			t.Errorf("%+v: delivered %v, want %v", test.list, got, test.delivered)
		}
	}
}

// A client learns what to do, and nothing of what the database said.
func TestSecurityProblems(t *testing.T) {
	t.Parallel()
	server := func(code string) error {
		return fmt.Errorf("read: %w", &pgconn.PgError{Code: code, Message: "hidden", Detail: "hidden"})
	}
	for _, test := range []struct {
		err        error
		status     int
		kind       string
		unexpected bool
	}{
		{fmt.Errorf("hidden: %w", ops.ErrUnknownDestination), 404, "unknown-destination", false},
		{fmt.Errorf("hidden: %w", ops.ErrNoAuditEntry), 404, "unknown-operation", false},
		{fmt.Errorf("hidden: %w", ops.UnknownEvent{Detail: "there is none"}), 404, "unknown-event", false},
		{ErrNotRunning, 409, "not-running", false},
		{ErrNotConfirmed, 409, "not-confirmed", false},
		{ops.ErrNotResumable, 409, "not-resumable", false},
		{ErrBusy, 503, "busy", false},
		{fmt.Errorf("hidden: %w", pg.ErrSchema), 503, "schema", false},
		{server("42501"), 503, "rights", true},
		{server("22021"), 422, "invalid", false},
		{server("42P01"), 503, "schema", true},
		{server("57014"), 503, "too-much", true},
		{server("57P03"), 503, "database", true},
		{server("XX000"), 500, "internal", true},
		{fmt.Errorf("hidden: %w", context.DeadlineExceeded), 503, "too-much", false},
		{fmt.Errorf("hidden: %w", context.Canceled), 499, "canceled", false},
		{errors.New("hidden"), 503, "database", true},
	} {
		p, unexpected := ProblemOf(test.err)
		if p.Status != test.status || p.Kind != test.kind || unexpected != test.unexpected || p.Title == "" || strings.Contains(p.Title+p.Detail, "hidden") {
			t.Errorf("%v: %+v, for the log: %t", test.err, p, unexpected)
		}
	}
}
