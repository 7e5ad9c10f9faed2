package relay

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/watch"
)

// looking returns a relay with a session and no watcher of its own: it looks when it is told to.
func looking(t testing.TB, cfg Config) *Relay {
	t.Helper()
	cfg.Watching.Interval = time.Nanosecond // no relay's look is recent enough
	return sessionOf(t, cfg)
}

// Every rule is told once when it fires and once when it is resolved, by three relays, of which none is the same at the
// end.
func TestEveryRuleIsToldOnceAndResolvedOnce(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	refusing := newReceiver(t, func(w http.ResponseWriter, r request) {
		if strings.HasPrefix(r.key, "refused") {
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	})
	ops := &pager{name: "ops"}
	cfg := db.config(to(refusing.URL))
	cfg.Routes = []Route{{Event: "t", To: []string{"default"}}}
	cfg.Alerts = alert.Config{Channels: []alert.Channel{ops}, VacuumBlockedOver: 2 * time.Second}
	cfg.Watching.Interval = 100 * time.Millisecond
	relays := []*running{start(t, cfg), start(t, cfg), start(t, cfg)}
	for _, r := range relays {
		r.instance()
	}

	db.insert(1, "refused")
	becomes(db, 1, `SELECT count(*) FROM outbox_delivery WHERE status = 'failed'`)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('nowhere', '{}', 'parked')`)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, available_at) VALUES ('t', '{}', 'slow', now() + interval '1 h')`)
	db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 h', claimed_by = 999, lease_expires_at = now() + interval '1 h'
		WHERE event_id = (SELECT id FROM outbox WHERE idempotency_key = 'slow')`)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
		SELECT 't', '{}', 'ordered-' || i, 'k', now() + interval '1 h' FROM generate_series(1, 2) i`)
	db.exec(`UPDATE outbox_delivery SET status = 'failed' WHERE event_id = (SELECT id FROM outbox WHERE idempotency_key = 'ordered-1')`)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
		SELECT 't', '{}', 'scheduled-' || i, 'later', now() + interval '1 h' FROM generate_series(1, 2) i`)
	db.exec(`UPDATE outbox_delivery SET next_attempt_at = now() - interval '1 h' WHERE event_id = (SELECT id FROM outbox WHERE idempotency_key = 'scheduled-2')`)
	db.exec(`INSERT INTO outbox_rescue (instance) VALUES (1), (2), (3)`)
	lost := db.plain().Load(1, "lost")
	for _, rule := range []string{alert.RuleBreakerOpen, alert.RuleQuarantined} { // by the relay that sees it
		db.exec(`INSERT INTO outbox_alert (rule, subject, detail) VALUES ($1, 'default', 'd')`, rule)
	}
	holder, err := pgx.Connect(t.Context(), db.dsn)
	must(t, err)
	t.Cleanup(func() { _ = holder.Close(context.Background()) })
	_, err = holder.Exec(t.Context(), `BEGIN; SELECT pg_current_xact_id()`)
	must(t, err)

	all := []string{alert.RuleBlockedKeys, alert.RuleBreakerOpen, alert.RuleFailed, alert.RuleVacuumBlocked, alert.RuleLag, alert.RuleParked, alert.RuleQuarantined, alert.RuleRescueStorm, alert.RuleUndelivered, alert.RuleWaitingKeys}
	var firing, both []string
	for _, rule := range all {
		firing = append(firing, rule+" firing")
		both = append(both, rule+" firing", rule+" resolved")
	}
	slices.Sort(firing)
	slices.Sort(both)
	eventually(t, "all alerts", func() bool { return len(ops.heard()) >= len(firing) })
	if got := ops.heard(); !slices.Equal(got, firing) {
		t.Errorf("told: %q", got)
	}
	for i := range relays {
		relays[i].stop()
		relays[i] = start(t, cfg)
	}
	for _, r := range relays {
		r.instance()
	}

	_, err = holder.Exec(t.Context(), `ROLLBACK`)
	must(t, err)
	db.exec(`UPDATE outbox_delivery SET status = 'discarded', claimed_by = NULL, lease_expires_at = NULL WHERE status IN ('pending', 'failed')`)
	db.exec(`DELETE FROM outbox_rescue`)
	db.exec(`DELETE FROM outbox WHERE id = ANY ($1)`, lost)
	db.exec(`UPDATE outbox_alert SET resolved_at = now() WHERE rule IN ('breaker_open', 'quarantined')`)
	becomes(db, len(all), `SELECT count(*) FROM outbox_alert WHERE resolved_at IS NOT NULL`)
	if got := ops.heard(); !slices.Equal(got, firing) {
		t.Errorf("told before a condition had ended for a while: %q", got)
	}
	db.exec(`UPDATE outbox_alert SET resolved_at = resolved_at - interval '61 s', due_at = now()`)
	eventually(t, "all recoveries", func() bool { return len(ops.heard()) >= len(both) })
	db.passWindow()
	becomes(db, 0, `SELECT count(*) FROM outbox_alert`) // whatever there was to tell has been told
	if got := ops.heard(); !slices.Equal(got, both) {
		t.Errorf("told: %q", got)
	}
}

// What is seen of a session that blocks vacuum: whatever kind it is, and only that.
func TestSessionsThatBlockVacuumAreNamed(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	server := pgtest.StartCopy(t, localpg.Options{Settings: map[string]string{"max_prepared_transactions": "5", "wal_level": "logical"}})
	pgtest.Migrate(t, server.DSN(""), migrations.Outbox)
	db := &database{TB: t, dsn: server.DSN(""), pool: pgtest.Pool(t, server.DSN(""))}
	r := looking(t, db.config(to("http://receiver.test/")))

	// First: it waits for the end of every transaction that is under way.
	db.exec(`SELECT pg_create_logical_replication_slot('decoder', 'test_decoding')`)

	session := func(name string, statements ...string) *pgx.Conn {
		t.Helper()
		cfg, err := pgx.ParseConfig(db.dsn)
		must(t, err)
		cfg.RuntimeParams["application_name"] = name
		conn, err := pgx.ConnectConfig(t.Context(), cfg)
		must(t, err)
		t.Cleanup(func() { _ = conn.Close(context.Background()) })
		for _, statement := range statements {
			_, err := conn.Exec(t.Context(), statement)
			must(t, err)
		}
		return conn
	}
	session("harmless", `BEGIN`, `SELECT count(*) FROM outbox`) // read committed, and no snapshot between statements
	session("writer", `BEGIN`, `SELECT pg_current_xact_id()`)
	session("reader", `BEGIN ISOLATION LEVEL REPEATABLE READ`, `SELECT count(*) FROM outbox`)
	session("outbox-relay", `BEGIN`, `SELECT pg_current_xact_id()`) // a relay of this role
	session("preparer", `BEGIN`, `SELECT pg_current_xact_id()`, `PREPARE TRANSACTION 'left <behind>'`)
	db.exec(`SELECT pg_create_physical_replication_slot('stuck', true)`)
	feedBack(t, db, "stuck", uint32(row[int64](db, `SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint`)))

	look := func() watch.Watch {
		t.Helper()
		must(t, r.watcher.Look(t.Context()))
		w, ok := r.watcher.Recent()
		if !ok {
			t.Fatal("no look")
		}
		return w
	}
	names := func(w watch.Watch) (all []string) {
		for _, h := range w.Holders {
			all = append(all, strings.Trim(h.Kind+" "+h.Application+h.Name+" "+h.User+" "+h.State, " "))
		}
		slices.Sort(all)
		return all
	}
	user := row[string](db, `SELECT current_user`)
	want := []string{"prepared left <behind> " + user, "session reader " + user + " idle in transaction", "session writer " + user + " idle in transaction"}
	if got := names(look()); !slices.Equal(got, want) {
		t.Errorf("holders %q, want %q", got, want)
	}
	// A slot counts once transactions have passed it by.
	db.exec(`DO $$ BEGIN FOR i IN 1..1100 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$`)
	want = append([]string{"catalog slot decoder"}, append(want, "slot stuck")...)
	w := look()
	if got := names(w); !slices.Equal(got, want) {
		t.Errorf("holders %q, want %q", got, want)
	}
	for _, h := range w.Holders {
		if text := h.String(); h.For <= 0 || strings.ContainsAny(text, "\n") || h.Kind == "session" && !strings.Contains(text, fmt.Sprintf("pg_terminate_backend(%d)", h.PID)) {
			t.Errorf("%+v: %s", h, text)
		}
	}
	// The time for which a slot stays where it is goes on from look to look.
	since := `SELECT t ->> 'since' FROM outbox_watch, jsonb_array_elements(sample -> 'tracked') t WHERE t ->> 'name' = 'stuck'`
	if before := row[string](db, since); look().At.IsZero() || row[string](db, since) != before {
		t.Error("a slot that did not move is said to have moved")
	}

	db.exec(`UPDATE outbox_watch SET sample = jsonb_set(sample, '{tracked}', '[]')`)
	r.cfg.Watching.PinnedOver = time.Nanosecond
	if reason := r.watcher.Pressure(); !strings.Contains(reason, "VACUUM") {
		t.Errorf("pressure: %q", reason)
	}
}

// feedBack tells the server as a standby does, with hot_standby_feedback, up to where its queries need old rows.
func feedBack(t testing.TB, db *database, slot string, xmin uint32) {
	t.Helper()
	cfg, err := pgconn.ParseConfig(db.dsn)
	must(t, err)
	cfg.RuntimeParams["replication"] = "true"
	conn, err := pgconn.ConnectConfig(t.Context(), cfg)
	must(t, err)
	at := row[string](db, `SELECT pg_current_wal_flush_lsn()::text`)
	conn.Frontend().SendQuery(&pgproto3.Query{String: "START_REPLICATION SLOT " + slot + " PHYSICAL " + at})
	must(t, conn.Frontend().Flush())
	for {
		message, err := conn.ReceiveMessage(t.Context())
		must(t, err)
		if _, ok := message.(*pgproto3.CopyBothResponse); ok {
			break
		}
	}
	message := binary.BigEndian.AppendUint64([]byte{'h'}, 0)
	for _, number := range []uint32{xmin, 0, 0, 0} { // the epochs are 0; nothing about catalogues
		message = binary.BigEndian.AppendUint32(message, number)
	}
	conn.Frontend().Send(&pgproto3.CopyData{Data: message})
	must(t, conn.Frontend().Flush())
	becomes(db, true, `SELECT xmin IS NOT NULL FROM pg_replication_slots WHERE slot_name = $1`, slot)
	must(t, conn.Close(t.Context()))
	becomes(db, false, `SELECT active FROM pg_replication_slots WHERE slot_name = $1`, slot)
}

// Without the right to see them, other roles' sessions are counted, and the alert says what to grant.
func TestHiddenSessionsAreAdmitted(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	server := pgtest.StartCopy(t, localpg.Options{})
	pgtest.Migrate(t, server.DSN(""), migrations.Outbox)
	db := &database{TB: t, dsn: server.DSN(""), pool: pgtest.Pool(t, server.DSN(""))}
	script, err := os.ReadFile("../migrations/roles.sql")
	must(t, err)
	db.exec(string(script))
	db.exec(`CREATE ROLE plain LOGIN; GRANT outbox_relay TO plain`)
	other, err := pgx.Connect(t.Context(), db.dsn)
	must(t, err)
	t.Cleanup(func() { _ = other.Close(context.Background()) })
	_, err = other.Exec(t.Context(), `BEGIN; SELECT pg_current_xact_id()`)
	must(t, err)

	cfg := db.config(to("http://receiver.test/"))
	cfg.Pool.ConnConfig.User = "plain"
	cfg.Alerts.VacuumBlockedOver = time.Nanosecond
	r := looking(t, cfg)
	must(t, r.watcher.Look(t.Context()))
	db.exec(`SELECT pg_current_xact_id()`)
	must(t, r.watcher.Look(t.Context()))
	detail := row[string](db, `SELECT detail FROM outbox_alert WHERE rule = 'vacuum_blocked'`)
	if w, _ := r.watcher.Recent(); w.HiddenSessions == 0 || !strings.Contains(detail, "GRANT pg_read_all_stats") {
		t.Errorf("%d hidden sessions, told: %q", w.HiddenSessions, detail)
	}

	db.exec(`GRANT pg_read_all_stats TO plain`)
	must(t, r.watcher.Look(t.Context()))
	detail = row[string](db, `SELECT detail FROM outbox_alert WHERE rule = 'vacuum_blocked'`)
	if w, _ := r.watcher.Recent(); w.HiddenSessions != 0 || !strings.Contains(detail, fmt.Sprintf("process %d ", other.PgConn().PID())) {
		t.Errorf("%d hidden sessions, told: %q", w.HiddenSessions, detail)
	}
}

// A look reads no table as a whole, however much there is, whether it was planned before or after.
func TestLookIsBounded(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t, "default", "second")
	conn := engineConn(t, db)
	const arguments = ` (0, '{}', 900, 600)`
	for _, statement := range []string{`PREPARE look (float8, text[], float8, float8) AS ` + watch.TakeWatch, `EXECUTE look` + arguments} {
		_, err := conn.Exec(t.Context(), statement, pgx.QueryExecModeSimpleProtocol)
		must(t, err)
	}
	db.exec(`ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
	db.fill(100_000, 80)
	db.exec(`UPDATE outbox_delivery SET status = 'failed', claimed_by = NULL, lease_expires_at = NULL WHERE event_id % 20 = 19 AND status = 'pending'`)
	result, err := conn.Query(t.Context(), `EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) EXECUTE look`+arguments, pgx.QueryExecModeSimpleProtocol)
	must(t, err)
	lines, err := pgx.CollectRows(result, pgx.RowTo[string])
	must(t, err)
	relaytest.WantPlan(t, "look", strings.Join(lines, "\n"), []string{
		"using outbox_delivery_blocked on outbox_delivery f", "using outbox_delivery_blocked on outbox_delivery h", "using outbox_delivery_order on outbox_delivery p",
		"Scan Backward using outbox_delivery_order on outbox_delivery p",
	})
	if got := row[int](db, `SELECT jsonb_array_length(sample -> 'lanes') FROM outbox_watch`); got != 2 {
		t.Errorf("%d lanes seen", got)
	}
}

// While vacuum is blocked, the index entries of what was delivered stand before the first that is pending. A look goes through
// them once, whatever it asks about a destination.
func TestLookPassesWhatWasDeliveredOnce(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	db.exec(`ALTER TABLE outbox_delivery SET (autovacuum_enabled = off)`)
	sessionOf(t, db.config(to("http://receiver.test/"))) // a destination that is served
	conn := engineConn(t, db)
	const firstPending = `SELECT destination, replay, next_attempt_at, event_id FROM outbox_delivery
		WHERE status = 'pending' AND destination >= '' ORDER BY destination, replay, next_attempt_at, event_id LIMIT 1`
	db.exec(`INSERT INTO outbox_delivery (event_id, destination) SELECT i, 'default' FROM generate_series(1, 20001) i; ANALYZE outbox_delivery`)
	look(t, conn)
	before := look(t, conn)
	db.blockVacuum()
	db.exec(`UPDATE outbox_delivery SET status = 'delivered', delivered_at = now() WHERE event_id <= 20000`)
	once, after := explain(t, conn, firstPending), look(t, conn)
	if passed := after.buffers - before.buffers; once.buffers < 500 || passed > once.buffers*3/2 {
		t.Errorf("%d pages for one pass, %d for a look", once.buffers, passed)
	}
}

// Only one of many relays looks; the others know what it saw, and all stand down for the same reason.
func TestOneRelayLooksForAll(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	cfg := db.config(to("http://receiver.test/"))
	cfg.Watching = watch.Config{Interval: time.Hour, DeadTuples: 1}
	relays := []*Relay{sessionOf(t, cfg), sessionOf(t, cfg), sessionOf(t, cfg)}
	db.exec(`CREATE TABLE looks (n int); CREATE FUNCTION note_look() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN INSERT INTO looks VALUES (1); RETURN NEW; END $$;
		CREATE TRIGGER note_look BEFORE UPDATE ON outbox_watch FOR EACH ROW EXECUTE FUNCTION note_look()`)
	for _, r := range relays {
		if reason := r.watcher.Pressure(); reason != "" {
			t.Errorf("stood down before the first look: %s", reason)
		}
	}
	var looking sync.WaitGroup
	for _, r := range relays {
		looking.Go(func() {
			for range 10 {
				if err := r.watcher.Look(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	looking.Wait()
	if n := row[int](db, `SELECT count(*) FROM looks`); n != 1 {
		t.Errorf("%d looks", n)
	}
	db.exec(`UPDATE outbox_watch SET sample = jsonb_set(sample, '{dead}', '{"outbox_delivery": 2}')`)
	for _, r := range relays {
		must(t, r.watcher.Look(t.Context()))
		if reason := r.watcher.Pressure(); reason != "table outbox_delivery has 2 dead rows, which VACUUM has yet to remove" {
			t.Errorf("pressure: %q", reason)
		}
	}
}

// A session that waits for a lock on the outbox is a reason to stand down.
func TestLockWaitsAreSeen(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(1, "locked")
	r := looking(t, db.config(to("http://receiver.test/")))
	locker := db.locker(`SELECT FROM outbox_delivery FOR UPDATE`)
	var waiting sync.WaitGroup
	waiting.Go(func() { db.exec(`UPDATE outbox_delivery SET last_error = 'x'`) })
	eventually(t, "the session that waits", func() bool {
		must(t, r.watcher.Look(t.Context()))
		return r.watcher.Pressure() == "1 session waits for locks on the outbox's tables"
	})
	_, err := locker.Exec(t.Context(), `ROLLBACK`)
	must(t, err)
	waiting.Wait()
	must(t, r.watcher.Look(t.Context()))
	if reason := r.watcher.Pressure(); reason != "" {
		t.Errorf("pressure: %q", reason)
	}
}
