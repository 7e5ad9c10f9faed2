package outbox_test

import (
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/outbox"
)

func TestRoutesFanOut(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox_route VALUES ('*', 'audit'), ('invoice.*', 'logistics'), ('*.issued', 'logistics'),
		('invoice.issued', 'analytics'), ('a_b%\c', 'odd'), ('order.*', 'orders')`)
	for _, c := range []struct {
		eventType string
		want      []string
	}{
		{"invoice.issued", []string{"analytics", "audit", "logistics"}}, // two routes to logistics: one delivery
		{"invoice.paid", []string{"audit", "logistics"}},
		{"invoice.", []string{"audit", "logistics"}},
		{"invoice", []string{"audit"}},
		{"Invoice.issued", []string{"audit", "logistics"}}, // by *.issued alone
		{`a_b%\c`, []string{"audit", "odd"}},               // LIKE's own wildcards mean themselves
		{`aXb%\c`, []string{"audit"}},
		{`a_bYY\c`, []string{"audit"}},
	} {
		e := event(c.eventType)
		e.Type = c.eventType
		tx := begin(t, db.pool, pgx.ReadCommitted)
		_, err := outbox.Enqueue(t.Context(), tx, e)
		must(t, err)
		must(t, tx.Commit(t.Context()))
		equal(t, c.eventType, db.strings(`SELECT destination FROM outbox_delivery JOIN outbox ON id = event_id
			WHERE idempotency_key = $1 ORDER BY destination`, c.eventType), c.want)
	}

	db.exec(`DELETE FROM outbox_route`)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('invoice.issued', '1', 'parked')`)
	equal(t, "parked", db.strings(`SELECT concat_ws('|', destination, status, attempts, claim)
		FROM outbox_delivery JOIN outbox ON id = event_id WHERE idempotency_key = 'parked'`), []string{"|pending|0|0"})
}

func TestDeliveryCarriesWhatClaimsNeed(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at) VALUES
		('t', ' "é" ', 'past', 'customer-1', '2001-01-01'), ('t', '1', 'future', NULL, now() + interval '366 days')`)
	equal(t, "deliveries", db.strings(`SELECT concat_ws('|', idempotency_key, payload_bytes, coalesce(d.ordering_key, '<null>'),
			CASE WHEN next_attempt_at = available_at THEN 'as asked'
			     WHEN next_attempt_at BETWEEN created_at AND clock_timestamp() THEN 'at once' END)
		FROM outbox_delivery d JOIN outbox ON id = event_id ORDER BY id`),
		[]string{"past|6|customer-1|at once", "future|1|<null>|as asked"})
}

func TestTableRefusesWhatCouldNotBeDelivered(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	for _, c := range []struct{ column, value, want string }{
		{"event_type", `NULL`, "23502"},
		{"payload", `NULL`, "23502"},
		{"idempotency_key", `NULL`, "23502"},
		{"event_version", `NULL`, "23502"},
		{"event_version", `0`, versionRule},
		{"event_version", `2147483648`, "22003"},
		{"ordering_key", `''`, orderingRule},
		{"related_reference", `''`, referenceRule},
		{"payload", `repeat(' ', 300000000)::json`, "22P02"},
		{"headers", `NULL`, "23502"},
		{"headers", `'null'`, headersRule},
		{"headers", `'[]'`, headersRule},
		{"headers", `'["a"]'`, headersRule},
		{"headers", `'[{"a": "b"}]'`, headersRule},
		{"headers", `'"a"'`, headersRule},
		{"headers", `'{"a": 1}'`, headersRule},
		{"headers", `'{"a": null}'`, headersRule},
		{"headers", `'{"a": "b", "c": ["d"]}'`, headersRule},
		{"headers", `'{"a": {"b": "c"}}'`, headersRule},
		{"headers", `'{"a": {}}'`, headersRule},
		{"headers", `'{"a": "b\r\nHost: evil"}'`, headersRule},
		{"headers", `'{"a\r\nHost": "evil"}'`, headersRule},
		{"headers", `'{"a": "b\n"}'`, headersRule},
		{"headers", `jsonb_build_object('a', repeat('x', 2000000))`, headersRule},
		{"headers", `'{"a": "\u0000"}'`, "22P05"},
		{"available_at", `NULL`, "23502"},
		{"available_at", `'infinity'`, availableRule},
		{"available_at", `'-infinity'`, availableRule},
		{"available_at", `'0001-12-31 BC'`, availableRule},
		{"available_at", `'200000-01-01'`, availableRule},
		{"available_at", `'9998-12-31'`, availableRule},
		{"available_at", `now() + interval '366 days 2 hours'`, availableRule},
		{"created_at", `'infinity'`, createdRule},
		{"created_at", `'-infinity'`, createdRule},
		{"created_at", `'9999-01-01 00:00+00'`, createdRule},
		{"created_at", `'1999-12-31 23:59:59+00'`, createdRule},
		{"id", `1`, "428C9"},
	} {
		columns, values := "", ""
		for column, value := range map[string]string{"event_type": `'t'`, "payload": `'1'`, "idempotency_key": `'k'`} {
			if column != c.column {
				columns, values = columns+column+", ", values+value+", "
			}
		}
		_, err := db.pool.Exec(t.Context(), `INSERT INTO outbox (`+columns+c.column+`) VALUES (`+values+c.value+`)`)
		equal(t, c.column+" "+c.value, refusal(t, err), c.want)
	}
	equal(t, "events", db.keys(), []string{})
	equal(t, "deliveries", db.deliveries(), []string{})
}

// A program may use one parameter for several columns, and give text as bytes and headers as a map, as for plain columns.
func TestParametersMayServeSeveralColumns(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	for _, text := range []any{"a-1", []byte("b-1"), sql.NullString{String: "c-1", Valid: true}} {
		_, err := db.pool.Exec(t.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, related_reference, headers)
			VALUES ($1, $2, $1, $1, $1, $3)`, text, []byte(`{"a":1}`), map[string]string{"Tenant": "x"})
		must(t, err)
	}
	equal(t, "events", db.strings(`SELECT concat_ws('|', event_type, payload::text, idempotency_key, ordering_key, related_reference, headers::text)
		FROM outbox ORDER BY id`), []string{
		`a-1|{"a":1}|a-1|a-1|a-1|{"Tenant": "x"}`, `b-1|{"a":1}|b-1|b-1|b-1|{"Tenant": "x"}`, `c-1|{"a":1}|c-1|c-1|c-1|{"Tenant": "x"}`,
	})
}

func TestEventsAreImmutable(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	const insert = `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k')`
	db.exec(insert)
	for _, statement := range []string{
		`UPDATE outbox SET payload = '2'`,
		`UPDATE outbox SET id = DEFAULT`,
		insert + ` ON CONFLICT (idempotency_key) DO UPDATE SET event_type = 'other'`,
	} {
		_, err := db.pool.Exec(t.Context(), statement)
		equal(t, statement, refusal(t, err), "23000")
	}
	_, err := db.pool.Exec(t.Context(), insert)
	equal(t, "second insert", refusal(t, err), "outbox_idempotency_key_is_unique")
	equal(t, "event", db.strings(`SELECT event_type || payload FROM outbox`), []string{"t1"})
}

func TestSchemasDoNotMix(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	dsn := pgtest.New(t)
	admin := &database{t: t, dsn: dsn, pool: pgtest.Pool(t, dsn)}
	schemas := []string{"billing", "Order Desk"}
	for _, schema := range schemas {
		admin.exec(`CREATE SCHEMA ` + pgx.Identifier{schema}.Sanitize())
		inSchema := dsn + "&search_path=%22" + map[string]string{"billing": "billing", "Order Desk": "Order%20Desk"}[schema] + "%22"
		pgtest.Migrate(t, inSchema, migrations.Outbox)
		db := &database{t: t, dsn: inSchema, pool: pgtest.Pool(t, inSchema)}
		db.exec(`INSERT INTO outbox_route VALUES ('*', $1)`, map[string]string{"billing": "ledger", "Order Desk": "warehouse"}[schema])

		tx := begin(t, db.pool, pgx.ReadCommitted)
		result, err := outbox.Enqueue(t.Context(), tx, event("same key"))
		must(t, err)
		must(t, tx.Commit(t.Context()))
		equal(t, schema, result, outbox.Result{Inserted: 1})

		// From elsewhere, by the table's full name: the deliveries stand where the table does.
		admin.exec(`INSERT INTO ` + pgx.Identifier{schema, "outbox"}.Sanitize() + ` (event_type, payload, idempotency_key) VALUES ('t', '1', 'qualified')`)
	}
	equal(t, "billing", admin.strings(`SELECT event_id || destination FROM billing.outbox_delivery ORDER BY 1`),
		[]string{"1ledger", "2ledger"})
	equal(t, "Order Desk", admin.strings(`SELECT event_id || destination FROM "Order Desk".outbox_delivery ORDER BY 1`),
		[]string{"1warehouse", "2warehouse"})
}
