package inbox

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/inboxsql"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// inboxStatements are those that run all the time: with their parameters' types and examples, how
// their plans come about, and how they must reach their rows.
var inboxStatements = map[string]struct {
	types, sql, args string
	planned          planned
	want             []string
}{
	"record": {
		"text, text, text, bytea, text, int, text, bytea, text, bigint, text, bigint, timestamptz, float8, timestamptz, timestamptz, bool, text", recordSQL,
		`'test', 'outbox', 'new', sha256(''), 't', 1, '', '{}', '{}', 1, '', 1, NULL, 0, NULL, NULL, false, ''`, kept, nil,
	},
	"record in order": {
		"text, text, text, bytea, text, int, text, bytea, text, bigint, text, bigint, timestamptz, float8, timestamptz, timestamptz, bool, text, bool", recordInOrderSQL,
		`'test', 'outbox', 'new', sha256(''), 't', 1, '', '{}', '{}', 1, 'o1', 1, NULL, 0, NULL, NULL, false, '', true`, pinned,
		[]string{"using inbox_events_one_of_its_key", "using inbox_events_waiting", "using inbox_events_failed_in_order"},
	},
	"known": {"text, text, text, bytea, timestamptz, text", knownSQL, `'test', 'outbox', '1', sha256(''), NULL, ''`, eachTime, []string{"using processed_events_pkey", "using inbox_events_pkey"}},
	"look":  {"text, text", checkDueSQL, `'test', 'outbox'`, eachTime, []string{"using inbox_events_due", "using inbox_events_processing"}},
	"claim": {
		"text, text, text, text[], int[], int, text", claimSQL, `'test', 'outbox', 'p', ARRAY['t1'], ARRAY[1], 8, 't2'`, pinned,
		[]string{
			"using inbox_events_due on inbox_events",
			"Index Cond: ((receiver = $1) AND (source = $2) AND (event_type = turn.event_type) AND (next_attempt_at IS NOT NULL) AND (next_attempt_at <= now()))",
			"Tid Scan on inbox_events e",
		},
	},
	"begin":  {"text, text, text, bigint, float8, text", beginSQL, `'test', 'outbox', '1', 1, 60, '(0,1)'`, pinned, []string{"Tid Scan on inbox_events"}},
	"finish": {"text, text, text, bigint, text, text, text, text, text", finishSQL, `'test', 'outbox', '1', 1, 'succeeded', '', '1', '', ''`, pinned, []string{"using inbox_events_pkey"}},
	"promote": {
		"text, text, text, bool", inboxsql.Promote, `'test', 'outbox', 'o1', true`, pinned,
		[]string{"Tid Scan on inbox_events e", "using inbox_events_waiting", "using inbox_events_one_of_its_key", "using inbox_events_failed_in_order"},
	},
	"give way": {"text, text, text", inboxsql.GiveWay, `'test', 'outbox', 'o1'`, pinned, []string{"using inbox_events_one_of_its_key", "using inbox_events_waiting"}},
	"settle": {
		"text, text, text, bigint, text, int, text, float8, bool", settleSQL, `'test', 'outbox', '1', 1, 'pending', 1, 'x', 1, false`, eachTime, []string{"on inbox_events"},
	},
	"committed": {"text, text, text, bigint, text", committedSQL, `'test', 'outbox', '1', 1, '1'`, eachTime, []string{"on inbox_events"}},
	"give back": {"text, text, text, bigint", giveBackSQL, `'test', 'outbox', '1', 1`, eachTime, []string{"on inbox_events"}},
	"rescue": {
		"text, text, int, text[], bigint[], int, text", rescueSQL, `'test', 'outbox', 1000, ARRAY['1'], ARRAY[1]::bigint[], 20, 'x'`, pinned,
		[]string{"using inbox_events_processing", "Tid Scan on inbox_events"},
	},
	"sweep": {
		"text, text, text, int, bool", sweepSQL, `'test', 'outbox', '', 1000, true`, pinned,
		[]string{"using inbox_events_waiting", "using inbox_events_one_of_its_key", "using inbox_events_failed_in_order"},
	},
	"adopt": {"text, text, int", adoptSQL, `'test', 'outbox', 1000`, pinned, []string{"using inbox_events_waiting", "Tid Scan on inbox_events"}},
}

// planned says how the plan of a statement comes about.
type planned int

const (
	kept     planned = iota // once, and kept
	pinned                  // once, behind pinSQL, and kept
	eachTime                // whenever it runs
)

// fillInbox adds n events: most succeeded, some due, waiting behind another of their key, being
// worked, failed.
const fillInbox = `
WITH event AS (
INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, processing_state, inbox_id, next_attempt_at, ordering_key, sequence, claimed_at, payload)
SELECT 'test', 'outbox', gen_random_uuid(), 't' || i % 10, CASE WHEN i % 100 < 80 THEN 'succeeded' WHEN i % 100 < 97 THEN 'pending' WHEN i % 1000 = 997 THEN 'processing' ELSE 'failed' END,
    nextval('inbox_id_seq'), CASE WHEN i % 100 BETWEEN 80 AND 90 OR i % 1000 = 997 THEN now() END, CASE WHEN i % 100 BETWEEN 91 AND 96 OR i % 100 = 99 THEN 'o' || i % 1000 END, i, now(), '{}'
FROM generate_series(1, $1::int) i
RETURNING source, idempotency_key)
INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) SELECT 'test', source, idempotency_key, 'recorded' FROM event`

// A plan is made once and kept: on an empty table, where anything looks cheap, or when nothing was
// due. It must still be right when there are 20,000 events, whether or not the table was analysed
// since.
func TestInboxPlansStayRightAsTheTableGrows(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for name, before := range map[string]int{"planned on an empty table": 0, "planned on one row": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.New(t, migrations.Inbox)
			conns := map[planned]*pgx.Conn{}
			for _, how := range []planned{kept, pinned, eachTime} {
				conn, err := pgx.Connect(t.Context(), dsn)
				pgtest.Must(t, err)
				t.Cleanup(func() { _ = conn.Close(t.Context()) })
				conns[how] = conn
			}
			exec := func(conn *pgx.Conn, query string, args ...any) {
				t.Helper()
				if _, err := conn.Exec(t.Context(), query, args...); err != nil {
					t.Fatalf("%s: %v", query, err)
				}
			}
			exec(conns[eachTime], "SET plan_cache_mode = force_custom_plan")
			// For a session instead of a transaction, because a plan is kept for a session.
			exec(conns[pinned], strings.ReplaceAll(pinSQL, ", true)", ", false)"), "off")
			exec(conns[kept], "ALTER TABLE inbox_events SET (autovacuum_enabled = off); ALTER TABLE processed_events SET (autovacuum_enabled = off)", pgx.QueryExecModeSimpleProtocol)
			exec(conns[kept], fillInbox, before)
			if before > 0 {
				exec(conns[kept], "VACUUM ANALYZE inbox_events, processed_events")
			}
			for statement, s := range inboxStatements {
				if s.planned != eachTime {
					exec(conns[s.planned], "SET plan_cache_mode = force_generic_plan")
				}
				if err := conns[s.planned].PgConn().Exec(t.Context(), `PREPARE "`+statement+`" (`+s.types+`) AS `+s.sql).Close(); err != nil {
					t.Fatalf("%s: %v", statement, err)
				}
				exec(conns[s.planned], `EXPLAIN EXECUTE "`+statement+`" (`+s.args+`)`, pgx.QueryExecModeSimpleProtocol)
			}
			exec(conns[kept], fillInbox, 20_000)
			for _, when := range []string{"loaded", "loaded, and planned again", "analysed"} {
				for statement, s := range inboxStatements {
					if s.planned == eachTime && when != "analysed" {
						continue // its plan is as good as the statistics, and better as soon as they are
					}
					rows, err := conns[s.planned].Query(t.Context(), `EXPLAIN (COSTS OFF) EXECUTE "`+statement+`" (`+s.args+`)`, pgx.QueryExecModeSimpleProtocol)
					pgtest.Must(t, err)
					lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
					if err != nil {
						t.Fatalf("%s: %v", statement, err)
					}
					wantInboxPlan(t, statement+", "+when, lines, s.want)
				}
				switch when {
				case "loaded": // PostgreSQL forgets plans when it likes
					exec(conns[kept], "DISCARD PLANS")
					exec(conns[pinned], "DISCARD PLANS")
				default:
					exec(conns[kept], "VACUUM ANALYZE inbox_events, processed_events")
				}
			}
		})
	}
}

var wholeScan = regexp.MustCompile(`(Seq|Bitmap Heap) Scan on (inbox|processed)_events`)

// wantInboxPlan checks that no table is read as a whole: neither in a sequential scan, nor through
// an index of which nothing but the source narrows the part.
func wantInboxPlan(t *testing.T, what string, lines, want []string) {
	t.Helper()
	plan := strings.Join(lines, "\n")
	var wrong []string
	for i, line := range lines {
		if wholeScan.MatchString(line) {
			wrong = append(wrong, line)
		}
		if strings.Contains(line, "_events_pkey on") && (i+1 == len(lines) || !strings.Contains(lines[i+1], "idempotency_key = ")) {
			wrong = append(wrong, line+": the whole source")
		}
	}
	for _, part := range want {
		if !strings.Contains(plan, part) {
			wrong = append(wrong, "missing: "+part)
		}
	}
	if len(wrong) > 0 {
		t.Errorf("%s:\n%s\nin\n%s", what, strings.Join(wrong, "\n"), plan)
	}
}

// The package inboxops repeats the lock of an ordering key and the notification of workers. Both
// must be those of this package.
func TestInboxOperatorsUseTheSameLockAndNotification(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Inbox)
	pool := pgtest.Pool(t, dsn)
	conn, err := pgx.Connect(t.Context(), dsn)
	pgtest.Must(t, err)
	defer conn.Close(context.WithoutCancel(t.Context()))
	exec := func(query string, args ...any) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), query, args...); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
	}
	exec(`INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state, ordering_key, payload) VALUES ('shipping', 'finance', 'k', 'failed', 'o', '{}')`)
	exec(listenSQL)
	notified := func() string {
		t.Helper()
		n, err := conn.WaitForNotification(t.Context())
		pgtest.Must(t, err)
		return n.Channel + " " + n.Payload
	}
	exec(notifySQL, "shipping", "finance")
	want := notified()
	failed := inboxops.Selection{States: []string{inboxops.Failed}}
	for key, left := range map[string]int64{"o": 1, "another": 0} {
		exec("UPDATE inbox_events SET processing_state = 'failed', next_attempt_at = NULL")
		tx, err := conn.Begin(t.Context())
		pgtest.Must(t, err)
		pgtest.Exec(t, tx, lockOrderSQL, "shipping", "finance", key)
		b, err := inboxops.New(pool).Replay(t.Context(), failed, nil)
		if err != nil || b.Done != 1 || b.KeysLeft != left {
			t.Errorf("beside the lock of %q: %+v, %v, want %d keys left", key, b, err, left)
		}
		pgtest.Must(t, tx.Rollback(t.Context()))
		testkit.Equal(t, "workers notified by", notified(), want)
	}
}

// How many events may be recorded at once depends on what the process works.
func TestRecordersLeaveRoomToWorkers(t *testing.T) {
	t.Parallel()
	const byPool, besideBacklog = 8, 2
	in := &engine{recording: make(chan struct{}, byPool), beside: make(chan struct{}, besideBacklog), runners: map[*runner]struct{}{}}
	wantRoom := func(want ...int) {
		t.Helper()
		got := []int{}
		for _, room := range in.recordingRoom() {
			got = append(got, cap(room))
		}
		if !slices.Equal(got, want) {
			t.Errorf("room for %v, want %v", got, want)
		}
	}
	wantRoom() // it only records
	s := &runner{engine: in}
	in.join(s)
	wantRoom(byPool)
	s.behind.Store(true)
	wantRoom(besideBacklog, byPool)
	s.behind.Store(false)
	wantRoom(byPool)
	in.leave(s)
	wantRoom()
}

// An event is not given up for a lock that another session keeps.
func TestLockThatDoesNotComeIsNoInterruption(t *testing.T) {
	t.Parallel()
	c := Config{MaxAttempts: 1, Jitter: new(float64)}
	for err, want := range map[error]State{errInterrupted: StateFailed, errKeyHeld: StatePending} {
		o := c.settlementOf(fmt.Errorf("commit: %w", err), 0, maxInterruptions-1, 0)
		testkit.Equal(t, err.Error(), o.state, want)
		testkit.Equal(t, "counts", o.interrupted, want == StateFailed)
	}
}
