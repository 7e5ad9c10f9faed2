package outbox_test

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// eventsOfAllSorts selects 1,000 events: of each five, one is for two destinations, one for one by three patterns, one for none.
// Some are passed at a glance, others are looked at rule by rule.
const eventsOfAllSorts = `
SELECT (ARRAY['order.paid', 'order.sent', 'mail', 'order', 'order.paid.twice'])[i % 5 + 1] AS event_type, i % 7 + 1 AS event_version, '{"n": 1}'::json AS payload,
       CASE i % 3 WHEN 0 THEN 'key ' ELSE 'key-' END || i AS idempotency_key, CASE WHEN i % 2 = 0 THEN 'customer-' || i % 10 END AS ordering_key,
       CASE i % 4 WHEN 0 THEN repeat('r', 255) WHEN 1 THEN 'a reference' END AS related_reference,
       CASE WHEN i % 6 = 0 THEN '{"Tenant": "x"}' ELSE '{}' END::jsonb AS headers
FROM generate_series(1, 1000) i`

const columnsOfAllSorts = `event_type, event_version, payload, idempotency_key, ordering_key, related_reference, headers`

// sorted counts the deliveries by the type of their events.
func (db *database) sorted() []string {
	db.t.Helper()
	return db.strings(`SELECT concat_ws(' ', event_type, destination, count(*), count(d.ordering_key))
		FROM outbox_delivery d JOIN outbox o ON o.id = d.event_id GROUP BY event_type, destination ORDER BY event_type, destination`)
}

// However many events a statement inserts and in which way, each is delivered once to each destination that a pattern leads to.
func TestManyEventsInOneStatement(t *testing.T) {
	t.Parallel()
	for name, insert := range map[string]func(*database){
		"INSERT SELECT": func(db *database) {
			db.exec(`INSERT INTO outbox (` + columnsOfAllSorts + `) ` + eventsOfAllSorts)
		},
		"COPY": func(db *database) {
			db.exec(`CREATE TABLE source AS ` + eventsOfAllSorts)
			var rows [][]any
			read, err := db.pool.Query(t.Context(), `SELECT * FROM source`)
			must(t, err)
			rows, err = pgx.CollectRows(read, func(row pgx.CollectableRow) ([]any, error) { return row.Values() })
			must(t, err)
			_, err = db.pool.CopyFrom(t.Context(), pgx.Identifier{"outbox"}, strings.Split(columnsOfAllSorts, ", "), pgx.CopyFromRows(rows))
			must(t, err)
		},
		"INSERT ON CONFLICT, and again": func(db *database) {
			for range 2 {
				db.exec(`INSERT INTO outbox (` + columnsOfAllSorts + `) ` + eventsOfAllSorts + ` ON CONFLICT (idempotency_key) DO NOTHING`)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			db.exec(`INSERT INTO outbox_route VALUES ('order.*', 'shop'), ('*.paid', 'shop'), ('order.paid*', 'shop'), ('order.sent', 'logistics'), ('*.paid*', 'ledger')`)
			insert(db)
			equal(t, "deliveries", db.sorted(), []string{
				"mail  200 100", "order  200 100", "order.paid ledger 200 100", "order.paid shop 200 100", "order.paid.twice ledger 200 100",
				"order.paid.twice shop 200 100", "order.sent logistics 200 100", "order.sent shop 200 100",
			})
		})
	}
}

// One event that breaks a rule is refused with all others of its statement, wherever it stands among them.
func TestOneBadEventAmongMany(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	for _, bad := range []int{1, 500, 1000} {
		_, err := db.pool.Exec(t.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key)
			SELECT CASE WHEN i = $1 THEN 'a b' ELSE 't' END, '1', i FROM generate_series(1, 1000) i`, bad)
		equal(t, "event "+strconv.Itoa(bad), refusal(t, err), typeRule)
	}
	equal(t, "events", db.keys(), []string{})
	equal(t, "deliveries", db.deliveries(), []string{})
}

// An event is passed at a glance, or by its rules one by one. Both ways have the same bounds, for each text beside others.
func TestBoundsBesideOtherTexts(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rules := map[string]string{"event_type": typeRule, "idempotency_key": keyRule, "ordering_key": orderingRule, "related_reference": referenceRule}
	for column, rule := range rules {
		for value, fit := range map[string]bool{
			"x": true, strings.Repeat("x", 255): true, "a b": column != "event_type", "!~": true,
			"": false, strings.Repeat("x", 256): false, " a": false, "a ": false, "a\nb": false, "\n": false, "\x1f": false, "a\x7f": false, "é": false, "\u2028": false,
		} {
			for _, other := range []string{"y", "y y", strings.Repeat("y", 255)} {
				values := map[string]string{"event_type": strings.ReplaceAll(other, " ", "."), "idempotency_key": other, "ordering_key": other, "related_reference": other}
				values[column] = value
				tx := begin(t, db.pool, pgx.ReadCommitted)
				_, err := tx.Exec(t.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, related_reference)
					VALUES ($1, '1', $2, $3, $4)`, values["event_type"], values["idempotency_key"], values["ordering_key"], values["related_reference"])
				must(t, tx.Rollback(t.Context()))
				want := rule
				if fit {
					want = ""
				}
				equal(t, column+" "+strconv.Quote(value)+" beside "+strconv.Quote(other), refusal(t, err), want)
			}
		}
	}
}

// A refusal says which event of a statement it means.
func TestRefusalNamesItsEvent(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	_, err := db.pool.Exec(t.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key)
		SELECT CASE WHEN n = 7 THEN 'in voice' ELSE 'invoice' END, '1', 'it''s ' || n FROM generate_series(1, 20) n`)
	equal(t, "rule", refusal(t, err), "outbox_event_type_is_1_to_255_printable_ascii_no_blanks")
	var refused *pgconn.PgError
	equal(t, "error of PostgreSQL", errors.As(err, &refused), true)
	equal(t, "detail", refused.Detail, "The event has the idempotency key 'it''s 7'.")
}

// No statement leaves a delivery in a state that relays do not know. Inserts write none of the columns; those that claims write are not guarded.
func TestUpdatesKeepDeliveriesSane(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'a'), ('t', '1', 'b')`)
	for _, set := range []string{
		`status = 'done'`, `status = 'delivered'`, `delivered_at = now()`, `status = 'failed', claimed_by = 1, lease_expires_at = now()`,
		`attempts = -1`, `next_attempt_at = 'infinity'`,
	} {
		_, err := db.pool.Exec(t.Context(), `UPDATE outbox_delivery SET `+set+` WHERE event_id = 1`)
		equal(t, set, refusal(t, err), "outbox_delivery_columns_are_sane")
	}
	db.exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now(), attempts = 1`)
}

// A session whose first statement inserted thousands of events keeps a plan for as many. Compiled, it would cost each single event after that
// milliseconds of a processor.
func TestFanOutIsNotCompiled(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`CREATE TABLE seen (jit text);
		CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.seen VALUES (current_setting('jit')); RETURN NULL; END $$;
		CREATE TRIGGER see AFTER INSERT ON outbox_delivery FOR EACH STATEMENT EXECUTE FUNCTION see();
		BEGIN;
		SET LOCAL jit = on;
		INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k');
		COMMIT`)
	if got := db.strings(`SELECT jit FROM seen`); !slices.Equal(got, []string{"off"}) {
		t.Errorf("deliveries are inserted with jit %q, want off", got)
	}
}
