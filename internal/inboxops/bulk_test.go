package inboxops_test

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/batch"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

const (
	pending, processing, succeeded, ignored, failed = inboxops.Pending, inboxops.Processing, inboxops.Succeeded, inboxops.Ignored, inboxops.Failed
)

func TestSelections(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	// Ids 1 to 8; types and states differ.
	types := []string{"invoice.created", "invoice.paid", "invoice_paid", "refund", "100%", "invoice.created", "invoice.created", "invoice.created"}
	states := []string{failed, failed, failed, ignored, ignored, pending, processing, succeeded}
	for i, kind := range types {
		d.event(i+1, states[i])
		d.exec("UPDATE inbox_events SET event_type = $2, received_at = $3::timestamptz WHERE inbox_id = $1", i+1, kind, fmt.Sprintf("2026-01-0%dT00:00:00Z", i+1))
	}
	d.exec("UPDATE inbox_events SET ordering_key = 'o', related_reference = 'customer 42' WHERE inbox_id = 3")
	d.exec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('shipping', 'finance', 'of the middleware', 'ignored')`)
	d.eventOf("billing", "finance", 9, failed, "ordering_key", "'p'", "received_at", "'2025-01-01'")
	d.exec("UPDATE inbox_events SET event_type = 'other' WHERE inbox_id = 9")
	day := func(n int) time.Time { return time.Date(2026, 1, n, 0, 0, 0, 0, time.UTC) }
	all := func(states ...string) []string { return states }

	type sel = inboxops.Selection
	for name, test := range map[string]struct {
		selection             inboxops.Selection
		list, replay, ignored string // ids
	}{
		"from":                 {sel{FromID: 4}, "456789", "459", "69"},
		"to":                   {sel{ToID: 2}, "12", "12", "12"},
		"range":                {sel{FromID: 2, ToID: 4}, "234", "234", "23"},
		"one":                  {sel{FromID: 3, ToID: 3}, "3", "3", "3"},
		"type":                 {sel{Type: "invoice.created"}, "1678", "1", "16"},
		"types":                {sel{Type: "invoice.*"}, "12678", "12", "126"},
		"an underscore":        {sel{Type: "invoice_paid"}, "3", "3", "3"},
		"a percent sign":       {sel{Type: "1*%"}, "5", "5", ""},
		"any type":             {sel{Type: "*"}, "123456789", "123459", "12369"},
		"failed":               {sel{States: all(failed)}, "1239", "1239", "1239"},
		"since":                {sel{Since: day(3)}, "345678", "345", "36"},
		"until":                {sel{Until: day(3)}, "129", "129", "129"},
		"between":              {sel{Since: day(2), Until: day(4)}, "23", "23", "23"},
		"key":                  {sel{Key: "k2"}, "2", "2", "2"},
		"no such key":          {sel{Key: "of the middleware"}, "", "", ""},
		"ordering key":         {sel{OrderingKey: "o"}, "3", "3", "3"},
		"reference":            {sel{RelatedReference: "customer 42"}, "3", "3", "3"},
		"receiver":             {sel{Receiver: "billing", Type: "*"}, "9", "9", "9"},
		"receiver and source":  {sel{Receiver: "billing", Source: "finance", States: all(failed)}, "9", "9", "9"},
		"no such source":       {sel{Source: "elsewhere", Type: "*"}, "", "", ""},
		"ids":                  {sel{IDs: []int64{8, 2, 9, 2, 77}}, "289", "29", "29"},
		"ids of a receiver":    {sel{IDs: []int64{2, 9}, Receiver: "billing"}, "9", "9", "9"},
		"a limit":              {sel{Type: "*", Limit: 2}, "89", "12", "12"},
		"a limit over failed":  {sel{States: all(failed), Limit: 2}, "39", "12", "12"},
		"all at once":          {sel{FromID: 1, ToID: 3, Type: "invoice*", States: all(failed), Since: day(2), Key: "k3", OrderingKey: "o"}, "3", "3", "3"},
		"failed of a key":      {sel{OrderingKey: "o", States: all(failed)}, "3", "3", "3"},
		"failed and pending":   {sel{States: all(failed, pending)}, "12369", "12369", "12369"},
		"replay only: ignored": {sel{States: all(ignored)}, "45", "45", "-"},
		"succeeded":            {sel{States: all(succeeded)}, "8", "8", "-"},
		"failed and succeeded": {sel{States: all(failed, succeeded)}, "12389", "12389", "-"},
		"pending":              {sel{States: all(pending)}, "6", "6", "6"},
		"processing":           {sel{States: all(processing)}, "7", "-", "-"},
	} {
		listed := test.selection
		if listed.Limit == 0 {
			listed.Limit = 100
		}
		page, err := d.ops.List(t.Context(), listed)
		got := ""
		for _, e := range page.Events {
			got = fmt.Sprint(e.InboxID) + got
		}
		if err != nil || got != test.list {
			t.Errorf("%s: listed %q, %v, want %q", name, got, err, test.list)
		}
		for want, operation := range map[string]struct {
			preview func(context.Context, inboxops.Selection) (inboxops.Bulk, error)
			act     func(context.Context, inboxops.Selection, func(inboxops.Bulk)) (inboxops.Bulk, error)
			changed string // condition of the changed
		}{
			"replay " + test.replay:  {d.ops.PreviewReplay, d.ops.Replay, "processing_state = 'pending' AND attempts = 0 AND interruptions = 0 AND processed_at IS NULL AND next_attempt_at <= now()"},
			"ignore " + test.ignored: {d.ops.PreviewIgnore, d.ops.Ignore, "processing_state = 'ignored' AND processed_at IS NOT NULL AND next_attempt_at IS NULL"},
		} {
			verb, want, _ := strings.Cut(want, " ")
			d.exec("CREATE TABLE before AS SELECT * FROM inbox_events")
			found, previewErr := operation.preview(t.Context(), test.selection)
			if n := d.count("SELECT count(*) FROM before b JOIN inbox_events e USING (inbox_id) WHERE b <> e"); n > 0 {
				t.Errorf("%s: the preview of %s changed %d events", name, verb, n)
			}
			b, err := operation.act(t.Context(), test.selection, nil)
			switch {
			case want == "-":
				if previewErr == nil || err == nil || !strings.Contains(err.Error(), "cannot be chosen") {
					t.Errorf("%s: %s: %v, %v", name, verb, previewErr, err)
				}
				want = ""
			case err != nil || previewErr != nil || b.Done != int64(len(want)) || b.Matched != b.Done || found.Matched != b.Done:
				t.Errorf("%s: %s: found %+v, %v, did %+v, %v", name, verb, found, previewErr, b, err)
			}
			if got := d.ids(operation.changed); got != want {
				t.Errorf("%s: %s: changed %q, want %q", name, verb, got, want)
			}
			if n := d.count("SELECT count(*) FROM before b JOIN inbox_events e USING (inbox_id) WHERE b <> e AND strpos($1, e.inbox_id::text) = 0", want); n > 0 {
				t.Errorf("%s: %s changed %d other events", name, verb, n)
			}
			d.exec("TRUNCATE inbox_events")
			d.exec("INSERT INTO inbox_events SELECT * FROM before")
			d.exec("DROP TABLE before")
		}
	}
}

func TestSelectionsThatMeanNothing(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	now := time.Now()
	for want, s := range map[string]inboxops.Selection{
		"ids 5 to 4: the first is above the last": {FromID: 5, ToID: 4},
		"ids -1 to 0: inbox ids begin at 1":       {FromID: -1},
		"is not before until":                     {Since: now, Until: now},
		"limit -1 is negative":                    {FromID: 1, Limit: -1},
		`state "done" cannot be chosen; choose`:   {States: []string{"done"}},
	} {
		for _, operation := range []func(context.Context, inboxops.Selection, func(inboxops.Bulk)) (inboxops.Bulk, error){d.ops.Replay, d.ops.Ignore} {
			if b, err := operation(t.Context(), s, nil); err == nil || b.Done != 0 || !strings.Contains(err.Error(), want) {
				t.Errorf("%+v: %+v, %v; want %q", s, b, err, want)
			}
		}
	}
	for want, s := range map[bool]inboxops.Selection{true: {Receiver: "r", Source: "s", Limit: 5}, false: {IDs: []int64{1}}} {
		if s.Empty() != want {
			t.Errorf("%+v: empty is %t", s, !want)
		}
	}
}

// What is named is accounted for, whatever its state.
func TestLeftOut(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	for id, state := range []string{failed, pending, processing, succeeded, ignored} {
		d.event(id+1, state)
	}
	d.event(6, failed)
	d.exec("UPDATE inbox_events SET payload = NULL WHERE inbox_id = 6")
	s := inboxops.Selection{IDs: []int64{6, 5, 4, 3, 2, 1, 99, 98}}
	found, err := d.ops.PreviewReplay(t.Context(), s)
	want := inboxops.Bulk{
		Counts: batch.Counts{Matched: 2}, States: map[string]int64{failed: 1, ignored: 1}, NoPayload: 1,
		OtherState: map[string]int64{pending: 1, processing: 1, succeeded: 1}, Unknown: 2, UnknownIDs: []int64{98, 99}, LatestID: 6,
		Sample: []inboxops.Sample{{1, "shipping", "finance", "t", "k1", failed}, {5, "shipping", "finance", "t", "k5", ignored}},
	}
	if err != nil || !reflect.DeepEqual(found, want) {
		t.Errorf("found %+v, %v\nwant  %+v", found, err, want)
	}
	if b := d.must(d.ops.Ignore, inboxops.Selection{Key: "k3"}); b.Done != 0 || b.OtherState[processing] != 1 {
		t.Errorf("%+v", b)
	}
	if b := d.must(d.ops.Ignore, inboxops.Selection{IDs: []int64{6}}); b.Done != 1 {
		t.Errorf("an event without payload is not ignored: %+v", b)
	}
}

// What others hold, or have changed since it was found, is left alone and counted.
func TestMissed(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	d.exec(`INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state, inbox_id, payload)
		SELECT 'shipping', 'finance', i::text, 'failed', i, '{}' FROM generate_series(1, 2600) i`)
	tx, err := d.pool.Begin(t.Context())
	pgtest.Must(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, tx, "SELECT FROM inbox_events WHERE inbox_id = 7 FOR UPDATE")
	progressed := 0
	b, err := d.ops.Replay(t.Context(), inboxops.Selection{States: []string{failed}}, func(so inboxops.Bulk) {
		progressed++
		if so.Done == 1499 { // the following thousand are found already
			d.exec("UPDATE inbox_events SET claim = claim + 1 WHERE inbox_id = 1600")
			d.exec("UPDATE inbox_events SET processing_state = 'ignored' WHERE inbox_id = 1601")
			d.exec("DELETE FROM inbox_events WHERE inbox_id = 1602")
		}
	})
	if err != nil || b.Matched != 2600 || b.Done != 2596 || b.Missed != 4 || progressed != 4 {
		t.Errorf("%+v, %v after %d batches", b, err, progressed)
	}
	testkit.Equal(t, "events left alone", d.ids("processing_state <> 'pending'"), "716001601")
}

// What was found is changed before the rest is looked at: a few among many cost no long
// transaction.
func TestChangesBeforeItLooksFurther(t *testing.T) {
	t.Parallel()
	d := newDesk(t)
	d.exec(`INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, inbox_id, payload)
		SELECT 'shipping', 'finance', i::text, CASE WHEN i % 10500 = 1 THEN 'few' ELSE 'many' END, CASE WHEN i % 2 = 1 THEN 'failed' ELSE 'succeeded' END, i, '{}'
		FROM generate_series(1, 21001) i`)
	for _, states := range [][]string{{failed}, {failed, succeeded}} {
		var done []int64
		b, err := d.ops.Replay(t.Context(), inboxops.Selection{Type: "few", States: states}, func(so inboxops.Bulk) { done = append(done, so.Done) })
		if err != nil || b.Done != 3 || !slices.Equal(done, []int64{1, 2, 3}) {
			t.Errorf("%v: %+v, %v, after each batch %v", states, b, err, done)
		}
		d.exec("UPDATE inbox_events SET processing_state = 'failed', next_attempt_at = NULL WHERE event_type = 'few'")
	}
}
