package outbox_test

import (
	"database/sql"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/outbox"
)

// The names of the table's constraints.
const (
	typeRule    = "outbox_event_type_is_1_to_255_printable_ascii_no_blanks"
	keyRule     = "outbox_idempotency_key_is_1_to_255_printable_ascii"
	createdRule = "outbox_created_at_is_in_years_2000_to_9998"
)

// An insert writes the event with the id of its transaction, by which relays find it, and makes no
// delivery.
func TestInsertWritesTheEventAlone(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox_route VALUES ('*', 'logistics')`)
	tx := begin(t, db.pool, pgx.ReadCommitted)
	pgtest.Exec(t, tx, `SAVEPOINT s; INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'a');
		RELEASE s; INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'b')`)
	var xid string
	pgtest.Must(t, tx.QueryRow(t.Context(), `SELECT pg_current_xact_id()::text`).Scan(&xid))
	pgtest.Must(t, tx.Commit(t.Context()))
	testkit.Equal(t, "transactions", db.strings(`SELECT xid::text FROM outbox`), []string{xid, xid})
	testkit.Equal(t, "deliveries", db.strings(`SELECT destination FROM outbox_delivery`), []string{})
}

// What has no type, no key, or a value that its column cannot hold is refused at the insert. All
// other rules are for when the event is routed.
func TestTableRefusesWhatIsNoEvent(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	for _, c := range []struct{ column, value, want string }{
		{"event_type", `NULL`, "23502"},
		{"event_type", `''`, typeRule},
		{"event_type", `'a b'`, typeRule},
		{"payload", `NULL`, "23502"},
		{"idempotency_key", `NULL`, "23502"},
		{"idempotency_key", `''`, keyRule},
		{"idempotency_key", `'a '`, keyRule},
		{"event_version", `NULL`, "23502"},
		{"event_version", `2147483648`, "22003"},
		{"payload", `repeat(' ', 300000000)::json`, "22P02"},
		{"headers", `NULL`, "23502"},
		{"headers", `'{"a": "\u0000"}'`, "22P05"},
		{"available_at", `NULL`, "23502"},
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
		testkit.Equal(t, c.column+" "+c.value, refusal(t, err), c.want)
	}
	testkit.Equal(t, "events", db.keys(), []string{})
}

// A program may use one parameter for several columns, and give text as bytes: event_type and
// idempotency_key are domains, so that it has to say that the parameter is text. It may give
// headers as a map.
func TestParametersMayServeSeveralColumns(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeDescribeExec} {
		for _, text := range []any{"a-1", []byte("b-1"), sql.NullString{String: "c-1", Valid: true}} {
			tx := begin(t, db.pool, pgx.ReadCommitted)
			pgtest.Exec(t, tx, `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, related_reference, headers)
				VALUES ($1::text, $2, $1::text, $1, $1, $3)`, mode, text, `{"a":1}`, map[string]string{"Tenant": "x"})
			var event string
			pgtest.Must(t, tx.QueryRow(t.Context(), `SELECT concat_ws('|', event_type, payload::text, idempotency_key, ordering_key, related_reference, headers::text)
				FROM outbox`).Scan(&event))
			pgtest.Must(t, tx.Rollback(t.Context()))
			testkit.Equal(t, mode.String(), strings.ReplaceAll(event, event[:3], "k"), `k|{"a":1}|k|k|k|{"Tenant": "x"}`)
		}
	}
}

// Without a cast, a parameter has the type of its column. Text is understood, also where it is NULL
// or of a type of the program.
func TestParametersOfOneColumn(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	type key string
	const insert = `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ($1, $2, $3)`
	for _, text := range []any{"a", key("b"), sql.NullString{String: "c", Valid: true}, pgtype.Text{String: "d", Valid: true}, new("e")} {
		db.exec(insert, "t", []byte(`{"a":1}`), text)
	}
	standard, err := sql.Open("pgx", db.dsn)
	pgtest.Must(t, err)
	defer standard.Close()
	_, err = standard.ExecContext(t.Context(), insert, "t", []byte(`{"a":1}`), "f")
	pgtest.Must(t, err)
	testkit.Equal(t, "keys", db.keys(), []string{"a", "b", "c", "d", "e", "f"})
	for _, missing := range []any{nil, sql.NullString{}} {
		_, err := db.pool.Exec(t.Context(), insert, "t", `1`, missing)
		testkit.Equal(t, "no key", refusal(t, err), "23502")
	}
	_, err = db.pool.Exec(t.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '1', $1, $1)`, "g")
	testkit.Equal(t, "one parameter, two types", refusal(t, err), "42P08")
	db.exec(insert, "t", `1`, []byte("g"))
	testkit.Equal(t, "bytes", db.keys()[6], `\x67`)
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
		testkit.Equal(t, statement, refusal(t, err), "23000")
	}
	_, err := db.pool.Exec(t.Context(), insert)
	testkit.Equal(t, "second insert", refusal(t, err), "outbox_idempotency_key_is_unique")
	testkit.Equal(t, "event", db.strings(`SELECT event_type || payload FROM outbox`), []string{"t1"})
}

// No statement leaves a delivery in a state that relays do not know. Those columns that claims
// write are not guarded.
func TestUpdatesKeepDeliveriesSane(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'a'), ('t', '1', 'b')`)
	db.cover()
	for _, set := range []string{
		`status = 'done'`, `status = 'delivered'`, `delivered_at = now()`, `status = 'failed', claimed_by = 1, lease_expires_at = now()`,
		`attempts = -1`, `next_attempt_at = 'infinity'`,
	} {
		_, err := db.pool.Exec(t.Context(), `UPDATE outbox_delivery SET `+set+` WHERE event_id = 1`)
		testkit.Equal(t, set, refusal(t, err), "outbox_delivery_columns_are_sane")
	}
	db.exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now(), attempts = 1`)
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
		pgtest.Must(t, err)
		pgtest.Must(t, tx.Commit(t.Context()))
		testkit.Equal(t, schema, result, outbox.Result{Inserted: 1})

		// From elsewhere, by the table's full name: the deliveries that a function makes stand
		// where the table does.
		admin.exec(`INSERT INTO ` + pgx.Identifier{schema, "outbox"}.Sanitize() + ` (event_type, payload, idempotency_key) VALUES ('t', '1', 'qualified')`)
		admin.exec(`SELECT ` + pgx.Identifier{schema, "outbox_cover_events"}.Sanitize() + `(0, 100, '3:3:')`)
	}
	testkit.Equal(t, "billing", admin.strings(`SELECT event_id || destination FROM billing.outbox_delivery ORDER BY 1`),
		[]string{"1ledger", "2ledger"})
	testkit.Equal(t, "Order Desk", admin.strings(`SELECT event_id || destination FROM "Order Desk".outbox_delivery ORDER BY 1`),
		[]string{"1warehouse", "2warehouse"})
	testkit.Equal(t, "in public", admin.strings(`SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace`), []string{})
}

// A NOTIFY in every producing transaction would serialise their commits.
func TestProducersNotifyOnlyALiveIdleRelay(t *testing.T) {
	t.Parallel()
	const (
		insert    = `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', gen_random_uuid())`
		duplicate = `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k') ON CONFLICT DO NOTHING`
	)
	const armed = `SELECT setval('outbox_armed', (extract(epoch FROM now()) * 1000)::bigint + 10000)`
	for name, c := range map[string]struct {
		relays, statement string
		want              []string
	}{
		"no relay":                        {`SELECT`, insert, nil},
		"a busy relay":                    {`SELECT setval('outbox_armed', 0)`, insert, nil},
		"an idle relay":                   {armed, insert, []string{"public"}},
		"a dead idle relay":               {`SELECT setval('outbox_armed', (extract(epoch FROM now()) * 1000)::bigint)`, insert, nil},
		"many statements":                 {armed, insert + `;` + insert, []string{"public"}},
		"a duplicate":                     {armed, duplicate, []string{"public"}}, // PostgreSQL computes defaults before it finds the conflict
		"a rolled back insert":            {armed, `BEGIN;` + insert + `;ROLLBACK`, nil},
		"a producer that must not notify": {armed, `SET LOCAL outbox.notify = off; ` + insert, nil},
		"an event in the future": {
			armed,
			`INSERT INTO outbox (event_type, payload, idempotency_key, available_at) VALUES ('t', '1', 'f', now() + interval '1 day')`,
			[]string{"public"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			db.exec(duplicate)
			db.exec(c.relays)
			listener, err := pgx.Connect(t.Context(), db.dsn)
			pgtest.Must(t, err)
			defer listener.Close(t.Context())
			pgtest.Exec(t, listener, `LISTEN outbox_wake`)

			db.exec(c.statement)
			db.exec(`NOTIFY outbox_wake, 'the end'`) // arrives after whatever the statement sent
			var got []string
			for {
				notification, err := listener.WaitForNotification(t.Context())
				pgtest.Must(t, err)
				if notification.Payload == "the end" {
					break
				}
				got = append(got, notification.Payload)
			}
			testkit.Equal(t, "notifications", got, c.want)
		})
	}
}
