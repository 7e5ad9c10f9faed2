package outbox_test

import (
	"database/sql"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/outbox"
)

func TestDuplicatesAreReportedAndWriteNothing(t *testing.T) {
	t.Parallel()
	withBothAPIs(t, func(t *testing.T, db *database) {
		first, err := db.enqueue(event("a"), event("b"))
		pgtest.Must(t, err)
		testkit.Equal(t, "first call", first, outbox.Result{Inserted: 2})

		again, err := db.enqueue(event("b"), event("c"), event("a"), event("d"), event("c"))
		pgtest.Must(t, err)
		testkit.Equal(t, "second call", again, outbox.Result{Inserted: 2, Duplicates: []string{"b", "a", "c"}})

		all, err := db.enqueue(event("d"), event("a"), event("a"))
		pgtest.Must(t, err)
		testkit.Equal(t, "third call", all, outbox.Result{Duplicates: []string{"d", "a", "a"}})

		testkit.Equal(t, "events", db.keys(), []string{"a", "b", "c", "d"})
	})
}

func TestDuplicatesWithinOneTransaction(t *testing.T) {
	t.Parallel()
	withBothAPIs(t, func(t *testing.T, db *database) {
		tx := db.begin(nil)
		for _, step := range []struct {
			savepoint string
			events    []outbox.Event
			want      outbox.Result
		}{
			{"", []outbox.Event{event("a")}, outbox.Result{Inserted: 1}},
			{"", []outbox.Event{event("a"), event("b")}, outbox.Result{Inserted: 1, Duplicates: []string{"a"}}},
			{"SAVEPOINT one", []outbox.Event{event("c"), event("b")}, outbox.Result{Inserted: 1, Duplicates: []string{"b"}}},
			{"SAVEPOINT two", []outbox.Event{event("d"), event("c"), event("a")}, outbox.Result{Inserted: 1, Duplicates: []string{"c", "a"}}},
			{"RELEASE one", []outbox.Event{event("c"), event("e"), event("d")}, outbox.Result{Inserted: 1, Duplicates: []string{"c", "d"}}},
			{"", []outbox.Event{event("e")}, outbox.Result{Duplicates: []string{"e"}}},
		} {
			if step.savepoint != "" {
				pgtest.Must(t, tx.Exec(step.savepoint))
			}
			got, err := tx.Enqueue(outbox.Producer{}, step.events...)
			pgtest.Must(t, err)
			testkit.Equal(t, "after "+step.savepoint, got, step.want)
		}
		pgtest.Must(t, tx.Commit())
		testkit.Equal(t, "events", db.keys(), []string{"a", "b", "c", "d", "e"})
	})
}

func TestKeyReused(t *testing.T) {
	t.Parallel()
	original := outbox.Event{
		Type: "invoice.issued", Version: 1, IdempotencyKey: "some key", Payload: json.RawMessage(`{"a":1}`),
		OrderingKey: "customer-1", RelatedReference: "INV-1", Headers: map[string]string{"X-Event-Tenant": "x", "traceparent": "00-1-2-01"},
	}
	cases := []struct {
		name   string
		edit   func(*outbox.Event)
		fields []string // that differ; none: a duplicate
	}{
		{"same", func(e *outbox.Event) {}, nil},
		{"version zero is one", func(e *outbox.Event) { e.Version = 0 }, nil},
		{"another moment", func(e *outbox.Event) { e.AvailableAt = in(300) }, nil},
		{"another trace", func(e *outbox.Event) {
			e.Headers = map[string]string{"X-Event-Tenant": "x", "TraceParent": "00-8-9-01", "tracestate": "a=b", "baggage": "c"}
		}, nil},
		{"type", func(e *outbox.Event) { e.Type = "invoice.paid" }, []string{"Type"}},
		{"version", func(e *outbox.Event) { e.Version = 2 }, []string{"Version"}},
		{"payload, only a blank", func(e *outbox.Event) { e.Payload = json.RawMessage(`{"a": 1}`) }, []string{"Payload"}},
		{"no ordering key", func(e *outbox.Event) { e.OrderingKey = "" }, []string{"OrderingKey"}},
		{"reference", func(e *outbox.Event) { e.RelatedReference = "INV-2" }, []string{"RelatedReference"}},
		{"header value", func(e *outbox.Event) { e.Headers = map[string]string{"X-Event-Tenant": "y"} }, []string{"Headers"}},
		{"no headers", func(e *outbox.Event) { e.Headers = nil }, []string{"Headers"}},
		{"everything", func(e *outbox.Event) {
			*e = outbox.Event{Type: "t", Version: 9, IdempotencyKey: e.IdempotencyKey, Payload: json.RawMessage(`1`), Headers: map[string]string{"ce-a": "b"}}
		}, []string{"Type", "Version", "Payload", "OrderingKey", "RelatedReference", "Headers"}},
	}
	withBothAPIs(t, func(t *testing.T, db *database) {
		_, err := db.enqueue(original)
		pgtest.Must(t, err)
		for _, c := range cases {
			e := original
			c.edit(&e)
			// Against the table, and against another event of the same call.
			elsewhere, elsewhereOriginal := e, original
			elsewhere.IdempotencyKey, elsewhereOriginal.IdempotencyKey = "fresh "+c.name, "fresh "+c.name
			for _, events := range [][]outbox.Event{{event("new " + c.name), e}, {elsewhereOriginal, elsewhere}} {
				result, err := db.enqueue(events...)
				if c.fields == nil {
					pgtest.Must(t, err)
					testkit.Equal(t, c.name, result, outbox.Result{Inserted: 1, Duplicates: []string{events[1].IdempotencyKey}})
					continue
				}
				reused, ok := errors.AsType[*outbox.KeyReusedError](err)
				if !ok || !errors.Is(err, outbox.ErrKeyReused) {
					t.Errorf("%s: got %v", c.name, err)
					continue
				}
				testkit.Equal(t, c.name, *reused, outbox.KeyReusedError{Index: 1, IdempotencyKey: events[1].IdempotencyKey, Fields: c.fields})
				testkit.Equal(t, c.name, result, outbox.Result{})
			}
		}
		testkit.Equal(t, "events", db.keys(), []string{
			"some key", "new same", "fresh same", "new version zero is one", "fresh version zero is one",
			"new another moment", "fresh another moment", "new another trace", "fresh another trace",
		})
	})
}

func TestKeyReusedErrorNamesEveryKey(t *testing.T) {
	t.Parallel()
	withBothAPIs(t, func(t *testing.T, db *database) {
		_, err := db.enqueue(event("a"), event("b"))
		pgtest.Must(t, err)
		a, b := event("a"), event("b")
		a.Version, b.RelatedReference, b.Payload = 2, "INV-1", json.RawMessage(`1`)
		_, err = db.enqueue(event("c"), b, a)
		testkit.Equal(t, "error", err.Error(), `outbox: event 1 ("b"): IdempotencyKey: holds another event, which differs in Payload, RelatedReference; roll back
outbox: event 2 ("a"): IdempotencyKey: holds another event, which differs in Version; roll back`)
	})
}

func TestSecondTransactionWaitsForTheFirst(t *testing.T) {
	t.Parallel()
	other := event("some key")
	other.Version = 2
	for name, c := range map[string]struct {
		commit    bool
		isolation sql.IsolationLevel
		second    outbox.Event
		want      outbox.Result
		reused    bool
		code      string
	}{
		"committed: a duplicate":            {commit: true, second: event("some key"), want: outbox.Result{Duplicates: []string{"some key"}}},
		"committed: the key is reused":      {commit: true, second: other, reused: true},
		"rolled back: inserted":             {second: other, want: outbox.Result{Inserted: 1}},
		"committed: beyond an old snapshot": {commit: true, second: event("some key"), isolation: sql.LevelRepeatableRead, code: "40001"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			withBothAPIs(t, func(t *testing.T, db *database) {
				first, second := db.begin(nil), db.begin(&sql.TxOptions{Isolation: c.isolation})
				pgtest.Must(t, second.Exec(`SELECT`)) // takes the snapshot of REPEATABLE READ
				_, err := first.Enqueue(outbox.Producer{}, event("some key"))
				pgtest.Must(t, err)

				type answer struct {
					outbox.Result
					error
				}
				answered := make(chan answer, 1)
				go func() {
					result, err := second.Enqueue(outbox.Producer{}, c.second)
					answered <- answer{result, err}
				}()
				db.waitUntilBlocked()
				if c.commit {
					pgtest.Must(t, first.Commit())
				} else {
					pgtest.Must(t, first.Rollback())
				}
				got := <-answered
				testkit.Equal(t, "result", got.Result, c.want)
				switch {
				case c.reused:
					testkit.Equal(t, "reused", errors.Is(got.error, outbox.ErrKeyReused), true)
				default:
					testkit.Equal(t, "code", refusal(t, got.error), c.code)
				}
				pgtest.Must(t, second.Rollback())
			})
		})
	}
}

// ON CONFLICT DO NOTHING without a target also swallows a collision of ids, as after a restore
// without sequences.
func TestCollisionOfIDsIsNoDuplicate(t *testing.T) {
	t.Parallel()
	withBothAPIs(t, func(t *testing.T, db *database) {
		_, err := db.enqueue(event("a"), event("b"))
		pgtest.Must(t, err)
		db.exec(`ALTER TABLE outbox ALTER COLUMN id RESTART WITH 1`)
		result, err := db.enqueue(event("c"), event("d"), event("e"))
		testkit.Equal(t, "result", result, outbox.Result{})
		testkit.Equal(t, "error", err.Error(), `outbox: insert events: 2 were neither inserted nor found, the first with key "c"; `+
			`roll back and try again, and if it stays so, see whether the sequence of outbox.id is behind its table, `+
			`or a trigger or a row-level policy hides rows`)
		testkit.Equal(t, "events", db.keys(), []string{"a", "b"})
	})
}

func in(days int) time.Time { return time.Now().UTC().AddDate(0, 0, days).Truncate(time.Microsecond) }
