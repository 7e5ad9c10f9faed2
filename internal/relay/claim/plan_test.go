package claim

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/send"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// engineConn returns a connection with the settings of the relay's own.
func engineConn(db *relaytest.Database) *pgx.Conn {
	db.Helper()
	pool, err := pgxpool.ParseConfig(db.DSN)
	relaytest.Must(db, err)
	conn, err := pgx.ConnectConfig(db.Context(), (&session.Config{Pool: pool}).PoolConfig().ConnConfig)
	relaytest.Must(db, err)
	db.Cleanup(func() { _ = conn.Close(db.Context()) })
	return conn
}

// A plan is made once and kept: on an empty table, where any scan looks cheap, or when nearly
// everything was delivered and what is pending seems to be nothing. It must still be right when
// there are 100,000 more, whether or not anybody has analysed the table since.
func TestPlansStayRightAsTheTableGrows(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for name, before := range map[string]func(*relaytest.Database){
		"planned on an empty table":           func(*relaytest.Database) {},
		"planned on one row":                  func(db *relaytest.Database) { db.Fill(1, 0); db.Exec(`VACUUM ANALYZE`) },
		"planned when all was delivered":      func(db *relaytest.Database) { db.Fill(20_000, 100); db.Exec(`VACUUM ANALYZE`) },
		"planned on an empty, analysed table": func(db *relaytest.Database) { db.Exec(`VACUUM ANALYZE`) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			db.Exec(`ALTER TABLE outbox SET (autovacuum_enabled = off); ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
			before(db)
			conn := engineConn(db)
			plan := planned(t, conn)
			db.Fill(100_000, 80)
			for name, want := range wantedPlans {
				relaytest.WantPlan(t, name+", loaded", plan(name), want)
			}
			db.Exec(`VACUUM ANALYZE`)
			for name, want := range wantedPlans {
				relaytest.WantPlan(t, name+", analysed", plan(name), want)
			}
		})
	}
}

const aLookup = "Index Cond: ((event_id = s.event_id) AND (destination = s.destination))"

const aRow = `ARRAY[1]::bigint[], ARRAY['default'], ARRAY[1]::bigint[]`

// hotStatements are those that run all the time, with their parameters' types and examples.
var hotStatements = map[string]struct{ types, sql, args string }{
	"claim": {
		"int, float8, int, int[], text[], bool[], int[], timestamptz[], bigint[], timestamptz[], bigint[], float8[], int[], bool[], bigint[]", ClaimDue,
		`1, 60, 8192, ARRAY[200,200], ARRAY['default','other'], ARRAY[false,true], ARRAY[100,100], ARRAY[now() - interval '1 hour', '-infinity'], ARRAY[0,0]::bigint[],
			ARRAY['infinity','infinity']::timestamptz[], ARRAY[0,0]::bigint[], ARRAY[2592000,2592000], ARRAY[200,200], ARRAY[false,true], NULL`,
	},
	"claim keys": {
		"int, float8, int, text[], int[], bool[], float8[], bigint[], int[], int[], text[], bigint[], bigint", claimKeys,
		`1, 60, 8192, ARRAY['default'], ARRAY[16], ARRAY[false], ARRAY[2592000], ARRAY[0], ARRAY[1], ARRAY[1], ARRAY['k'], ARRAY[0]::bigint[], 1`,
	},
	"search":    {"int", selectDue, `1`},
	"delivered": {"bigint[], text[], bigint[], float8[], smallint[]", settle.WriteDelivered, aRow + `, ARRAY[0], ARRAY[200]`},
	"retry": {
		"bigint[], text[], bigint[], float8[], smallint[], text[], text[], float8[], int[], bool[]", settle.WriteRetry,
		aRow + `, ARRAY[0], ARRAY[500], ARRAY['x'], ARRAY['x'], ARRAY[1], ARRAY[0], ARRAY[true]`,
	},
	"hold": {"bigint[], text[], bigint[], bool[]", settle.WriteHold, aRow + `, ARRAY[true]`},
	"failed": {
		"bigint[], text[], bigint[], float8[], smallint[], text[], text[], bool[], bool[]", settle.WriteFailed,
		aRow + `, ARRAY[0], ARRAY[422], ARRAY['x'], ARRAY['x'], ARRAY[true], ARRAY[false]`,
	},
	"unsettled": {"bigint[], text[], bigint[], int[], text[]", settle.FindUnsettled, aRow + `, ARRAY[0], ARRAY['retry']`},
	"restore": {
		"int, bigint[], text[], bigint[], int[], text[], timestamptz[], bool[], bigint[]", settle.RestoreLostClaims,
		`1, ` + aRow + `, ARRAY[0], ARRAY['k'], ARRAY[now()], ARRAY[true], ARRAY[0]`,
	},
	"payload": {"bigint", send.SelectPayload, `1`},
	"rescue":  {"int", session.RescueRelay, `1`},
	"leave":   {"int", session.DeregisterRelay, `1`},
	"void":    {"int, timestamptz", session.VoidUnacknowledged, `1, NULL`},
}

// wantedPlans says how each of them must reach its rows.
var wantedPlans = map[string][]string{
	"claim": {
		"Index Scan using outbox_delivery_due on outbox_delivery", "Tid Scan on outbox_delivery", "Index Scan using outbox_pkey",
		"AND (replay = scan.replay) AND (ROW(next_attempt_at, event_id) > ROW(scan.after_at, scan.after_id)) AND (ROW(next_attempt_at, event_id) <= ROW(LEAST(scan.until_at, now()), scan.until_id)))",
	},
	"claim keys": {
		"Index Scan using outbox_delivery_order", "Tid Scan on outbox_delivery", "Index Scan using outbox_pkey",
		"Index Cond: ((destination = key.destination) AND (ordering_key = key.ordering_key) AND (ROW(joined, event_id) > ROW(0, key.floor)))",
		"using outbox_delivery_heads on outbox_delivery f",
		"AND (ordering_key = n.ordering_key) AND (ROW(joined, event_id) > ROW(0, CASE", "AND (ordering_key = n.ordering_key) AND (joined = 0) AND (event_id > lane",
	},
	"search": {
		"Index Cond: (destination > ''::text)", "Index Cond: (destination > p_1.destination)",
		"Index Cond: ((destination = p.destination) AND (replay = false))", "Index Cond: ((destination = p.destination) AND (replay = true))",
	},
	"delivered": {aLookup, "Tid Scan on outbox_delivery d"},
	"retry":     {aLookup, "Tid Scan on outbox_delivery d"},
	"hold":      {aLookup, "Tid Scan on outbox_delivery d"},
	"failed":    {aLookup, "Tid Scan on outbox_delivery d"},
	"unsettled": {aLookup},
	"restore":   {aLookup, "Tid Scan on outbox_delivery d", "Index Cond: (id = s.event_id)"},
	"payload":   {"Index Cond: (id = $1)"},
	"rescue":    {"Index Cond: (id = $1)"},
	"leave":     {"Index Cond: (id = $1)"},
	"void":      {"Index Cond: (id = $1)"},
}

// planned prepares and runs the hot statements, as a relay does at its start, and returns what
// shows their plans.
func planned(t testing.TB, conn *pgx.Conn) (plan func(name string) string) {
	t.Helper()
	for name, s := range hotStatements {
		for _, statement := range []string{`PREPARE "` + name + `" (` + s.types + `) AS ` + s.sql, `EXECUTE "` + name + `" (` + s.args + `)`} {
			_, err := conn.Exec(t.Context(), statement, pgx.QueryExecModeSimpleProtocol)
			relaytest.Must(t, err)
		}
	}
	return func(name string) string {
		t.Helper()
		return relaytest.PlanOf(t, conn, `EXECUTE "`+name+`" (`+hotStatements[name].args+`)`, pgx.QueryExecModeSimpleProtocol)
	}
}

// No column that a claim writes stands in an index, and the pages have room, also while a
// transaction keeps them from being pruned: claims leave no dead index entries.
func TestClaimsAreHeapOnlyUpdates(t *testing.T) {
	t.Parallel()
	const events = 2000
	db := relaytest.Covered(t, "a") // the shorter a row is, the more it grows by a claim
	db.Insert(events, "key")
	db.Exec(`ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
	conn := engineConn(db)
	_, err := conn.Exec(t.Context(), `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM outbox LIMIT 1`)
	relaytest.Must(t, err)
	s := claims{db.Pool}
	relayID := relaytest.Row[int32](db, `INSERT INTO outbox_relay (name, version) VALUES ('test', '') RETURNING id`)
	var position lane.Keyset
	for range 4 {
		result, err := s.Claim(t.Context(), relayID, time.Minute, []Request{{Destination: "a", Scans: []lane.Scan{{Free: events / 4, After: position}}}})
		relaytest.Must(t, err)
		claimed := result.Deliveries
		position = result.scans[0].Last
		if len(claimed) != events/4 {
			t.Fatalf("claimed %d", len(claimed))
		}
	}
	relaytest.Must(t, conn.Close(t.Context()))
	db.Pool.Reset() // a backend reports its statistics at the latest when it ends
	relaytest.Becomes(db, "2000 2000", `SELECT n_tup_upd || ' ' || n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'outbox_delivery'`)
}
