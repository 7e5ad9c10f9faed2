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
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A pager is a channel that remembers what it was told.
type pager struct {
	name   string
	answer func(n int) error // to the nth notification; nil: always taken

	mu   sync.Mutex
	told []Alert
}

func (p *pager) Name() string { return p.name }

func (p *pager) Notify(_ context.Context, a Alert) error {
	p.mu.Lock()
	n := len(p.told) + 1
	p.told = append(p.told, a)
	p.mu.Unlock()
	if p.answer != nil {
		return p.answer(n)
	}
	return nil
}

// heard returns "rule subject state" of every notification, sorted.
func (p *pager) heard() (all []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.told {
		all = append(all, a.Rule+" "+a.State())
	}
	slices.Sort(all)
	return all
}

func (p *pager) last() Alert {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.told[len(p.told)-1]
}

// looking returns a relay with a session and no watcher of its own: it looks when it is told to.
func looking(t testing.TB, cfg Config) *Relay {
	t.Helper()
	cfg.Watching.Interval = time.Nanosecond // nobody's look is recent enough
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
	cfg.Routes = []Route{{"t", []string{"default"}}}
	cfg.Alerts = Alerts{Channels: []Channel{ops}, HorizonOver: 2 * time.Second}
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
	db.exec(`INSERT INTO outbox_rescue (instance, deliveries) VALUES (1, 10), (2, 0), (3, 5)`)
	for _, rule := range []string{RuleBreakerOpen, RuleQuarantined} { // by whoever sees it
		db.exec(`INSERT INTO outbox_alert (rule, subject, detail) VALUES ($1, 'default', 'd')`, rule)
	}
	holder, err := pgx.Connect(t.Context(), db.dsn)
	must(t, err)
	t.Cleanup(func() { _ = holder.Close(context.Background()) })
	_, err = holder.Exec(t.Context(), `BEGIN; SELECT pg_current_xact_id()`)
	must(t, err)

	all := []string{RuleBlockedKeys, RuleBreakerOpen, RuleFailed, RuleHorizonPinned, RuleLag, RuleParked, RuleQuarantined, RuleRescueStorm}
	var firing, both []string
	for _, rule := range all {
		firing = append(firing, rule+" firing")
		both = append(both, rule+" firing", rule+" resolved")
	}
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

// What is seen of a session that pins the horizon: whatever kind it is, and only that.
func TestHoldersOfTheHorizonAreNamed(t *testing.T) {
	t.Parallel()
	server := pgtest.Start(t, localpg.Options{Settings: map[string]string{"max_prepared_transactions": "5", "wal_level": "logical"}})
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

	look := func() Watch {
		t.Helper()
		must(t, r.look(t.Context()))
		w, ok := r.lookout.recent()
		if !ok {
			t.Fatal("no look")
		}
		return w
	}
	names := func(w Watch) (all []string) {
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
	if reason := r.pressure(); !strings.Contains(reason, "VACUUM") {
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
	for _, number := range []uint32{xmin, 0, 0, 0} { // the epochs are 0; nothing about the catalogs
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
	t.Parallel()
	server := pgtest.Start(t, localpg.Options{})
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
	cfg.Alerts.HorizonOver = time.Nanosecond
	r := looking(t, cfg)
	must(t, r.look(t.Context()))
	db.exec(`SELECT pg_current_xact_id()`)
	must(t, r.look(t.Context()))
	detail := row[string](db, `SELECT detail FROM outbox_alert WHERE rule = 'horizon_pinned'`)
	if w, _ := r.lookout.recent(); w.HiddenSessions == 0 || !strings.Contains(detail, "GRANT pg_read_all_stats") {
		t.Errorf("%d hidden sessions, told: %q", w.HiddenSessions, detail)
	}

	db.exec(`GRANT pg_read_all_stats TO plain`)
	must(t, r.look(t.Context()))
	detail = row[string](db, `SELECT detail FROM outbox_alert WHERE rule = 'horizon_pinned'`)
	if w, _ := r.lookout.recent(); w.HiddenSessions != 0 || !strings.Contains(detail, fmt.Sprintf("process %d ", other.PgConn().PID())) {
		t.Errorf("%d hidden sessions, told: %q", w.HiddenSessions, detail)
	}
}
