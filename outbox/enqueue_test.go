package outbox_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/outbox"
)

func TestEventExistsOnlyOnceCommitted(t *testing.T) {
	t.Parallel()
	withBothAPIs(t, func(t *testing.T, db *database) {
		rolledBack := db.begin(nil)
		_, err := rolledBack.Enqueue(outbox.Producer{}, event("rolled back"))
		pgtest.Must(t, err)
		pgtest.Must(t, rolledBack.Rollback())

		committed := db.begin(nil)
		_, err = committed.Enqueue(outbox.Producer{}, event("committed"))
		pgtest.Must(t, err)
		testkit.Equal(t, "before the commit", db.keys(), []string{})
		pgtest.Must(t, committed.Commit())
		testkit.Equal(t, "events", db.keys(), []string{"committed"})
	})
}

func TestEveryFieldIsStored(t *testing.T) {
	t.Parallel()
	withBothAPIs(t, func(t *testing.T, db *database) {
		available := in(300).Truncate(time.Second)
		full := outbox.Event{
			Type: "invoice.issued", Version: 3, Payload: json.RawMessage(`{}`), IdempotencyKey: `"a\b",{c}`,
			OrderingKey: "NULL", RelatedReference: "INV-4711", Headers: map[string]string{"X-Event-Tenant": `a "b" \c`, "x-event-b": ""},
			AvailableAt: available.Add(678_901_999).In(time.FixedZone("", 7200)),
		}
		_, err := db.enqueue(full, event("defaults"))
		pgtest.Must(t, err)
		testkit.Equal(t, "rows", db.strings(`SELECT concat_ws('|', event_type, event_version, payload, idempotency_key,
			coalesce(ordering_key, '<null>'), coalesce(related_reference, '<null>'), headers,
			CASE available_at WHEN created_at THEN 'now' ELSE (available_at AT TIME ZONE 'UTC')::text END) FROM outbox ORDER BY id`), []string{
			`invoice.issued|3|{}|"a\b",{c}|NULL|INV-4711|{"x-event-b": "", "X-Event-Tenant": "a \"b\" \\c"}|` + available.Format(time.DateTime) + `.678901`,
			`invoice.issued|1|{"invoice":4711}|defaults|<null>|<null>|{}|now`,
		})
	})
}

func TestPayloadIsStoredByteForByte(t *testing.T) {
	t.Parallel()
	payloads := []string{
		`"\u0000"`, `"\ud800"`, `1e3`, `9007199254740993`, `-0.10`, `{"b":1,"a":2,"a":3}`, " {\t\"a\" :\r\n1 }\n", `"\/ \" \\ {,} é 😀"`,
		"\"\x7f\"", `"<script>&"`, `null`, `""`, `"NULL"`,
	}
	withBothAPIs(t, func(t *testing.T, db *database) {
		var events []outbox.Event
		for i, payload := range payloads {
			e := event(fmt.Sprint(i))
			e.Payload = json.RawMessage(payload)
			events = append(events, e)
		}
		_, err := db.enqueue(events...)
		pgtest.Must(t, err)
		testkit.Equal(t, "payloads", db.strings(`SELECT payload::text FROM outbox ORDER BY id`), payloads)

		again, err := db.enqueue(events...)
		pgtest.Must(t, err)
		testkit.Equal(t, "inserted again", again.Inserted, 0)
	})
}

func TestManyEventsKeepTheirOrder(t *testing.T) {
	t.Parallel()
	withBothAPIs(t, func(t *testing.T, db *database) {
		const many = 10_000
		var events []outbox.Event
		var keys []string
		for i := range many {
			keys = append(keys, fmt.Sprintf("key %d", (i*7919)%many))
			events = append(events, event(keys[i]))
		}
		result, err := db.enqueue(events...)
		pgtest.Must(t, err)
		testkit.Equal(t, "result", result, outbox.Result{Inserted: many})
		testkit.Equal(t, "keys", db.keys(), keys)
	})
}

func TestNoEventsIsNoStatement(t *testing.T) {
	t.Parallel()
	result, err := outbox.Enqueue(t.Context(), nil)
	pgtest.Must(t, err)
	testkit.Equal(t, "result", result, outbox.Result{})
}

// A pooler in transaction mode leaves some of pgx's ways to run a statement.
func TestEveryQueryModeOfPgx(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		config, err := pgx.ParseConfig(dsn)
		pgtest.Must(t, err)
		config.DefaultQueryExecMode = mode
		conn, err := pgx.ConnectConfig(t.Context(), config)
		pgtest.Must(t, err)
		defer conn.Close(t.Context())

		e := event(mode.String())
		e.Payload = json.RawMessage(`{"quote":"'\u0000\\", "$1":"$1"}`)
		for _, want := range []outbox.Result{{Inserted: 1}, {Duplicates: []string{mode.String()}}} {
			tx, err := conn.Begin(t.Context())
			pgtest.Must(t, err)
			got, err := outbox.Enqueue(t.Context(), tx, e)
			pgtest.Must(t, err)
			pgtest.Must(t, tx.Commit(t.Context()))
			testkit.Equal(t, "result", got, want)
		}
	}
}

func TestTraceHeaders(t *testing.T) {
	t.Parallel()
	type key struct{}
	producer := outbox.Producer{TraceHeaders: func(ctx context.Context) map[string]string {
		return ctx.Value(key{}).(map[string]string)
	}}
	own := func(headers map[string]string) outbox.Event {
		e := event("some key")
		e.Headers = headers
		return e
	}
	filler := strings.Repeat("x", 8100)
	for _, c := range []struct {
		name  string
		trace map[string]string
		event outbox.Event
		want  string
	}{
		{
			"added",
			map[string]string{"traceparent": "00-1-2-01", "tracestate": "a=b", "baggage": "c=d"},
			own(map[string]string{"X-Event-Tenant": "x"}),
			`{"baggage": "c=d", "tracestate": "a=b", "traceparent": "00-1-2-01", "X-Event-Tenant": "x"}`,
		},
		{"in any case", map[string]string{"Traceparent": "00-1-2-01"}, own(nil), `{"traceparent": "00-1-2-01"}`},
		{"no trace", nil, own(nil), `{}`},
		{
			"the event's own context stays whole",
			map[string]string{"traceparent": "00-1-2-01", "tracestate": "a=b"},
			own(map[string]string{"Traceparent": "00-8-9-01"}), `{"Traceparent": "00-8-9-01"}`,
		},
		{
			"other names are left out",
			map[string]string{"traceparent": "00-1-2-01", "b3": "1", "Host": "evil"},
			own(nil),
			`{"traceparent": "00-1-2-01"}`,
		},
		{
			"no header value is left out",
			map[string]string{"traceparent": "00-1-2-01", "baggage": "a=\r\nHost: evil"},
			own(nil),
			`{"traceparent": "00-1-2-01"}`,
		},
		{
			"what does not fit is left out",
			map[string]string{"traceparent": "00-1-2-01", "baggage": filler},
			own(map[string]string{"ce-a": filler}),
			`{"ce-a": "` + filler + `", "traceparent": "00-1-2-01"}`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			tx := begin(t, db.pool, pgx.ReadCommitted)
			_, err := producer.Enqueue(context.WithValue(t.Context(), key{}, c.trace), tx, c.event)
			pgtest.Must(t, err)
			pgtest.Must(t, tx.Commit(t.Context()))
			testkit.Equal(t, "headers", db.strings(`SELECT headers::text FROM outbox`), []string{c.want})
		})
	}
}

func TestErrorsTellWhatToDo(t *testing.T) {
	t.Parallel()
	withBothAPIs(t, func(t *testing.T, db *database) {
		tx := db.begin(nil)
		pgtest.Must(t, tx.Exec(`SET LOCAL search_path = pg_catalog`))
		_, err := tx.Enqueue(outbox.Producer{}, event("some key"))
		testkit.Equal(t, "code", refusal(t, err), "42P01")
		testkit.Equal(t, "error", err.Error(), `outbox: insert events: ERROR: relation "outbox" does not exist (SQLSTATE 42P01); `+
			`run outbox-relay migrate up, or put the schema of the outbox on the search_path`)
		pgtest.Must(t, tx.Rollback())
	})
}
