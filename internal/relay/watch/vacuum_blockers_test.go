package watch

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// alone returns an outbox on its own server, which shares neither transactions nor roles with
// others.
func alone(t *testing.T, settings map[string]string) *relaytest.Database {
	t.Helper()
	_, db := relaytest.ServeCopy(t, localpg.Options{Settings: settings})
	return db
}

// connect opens a session that executes statements.
func connect(db *relaytest.Database, application string, statements ...string) *pgx.Conn {
	db.Helper()
	cfg, err := pgx.ParseConfig(db.DSN)
	relaytest.Must(db, err)
	cfg.RuntimeParams["application_name"] = application
	conn, err := pgx.ConnectConfig(db.Context(), cfg)
	relaytest.Must(db, err)
	db.Cleanup(func() { _ = conn.Close(context.Background()) })
	for _, statement := range statements {
		_, err := conn.Exec(db.Context(), statement)
		relaytest.Must(db, err)
	}
	return conn
}

// What is seen of a session that blocks vacuum: whatever kind it is, and only that.
func TestSessionsThatBlockVacuumAreNamed(t *testing.T) {
	t.Parallel()
	db := alone(t, map[string]string{"max_prepared_transactions": "5", "wal_level": "logical"})
	w := newWatcher(t, enginePool(t, db.DSN), alert.Config{})
	w.Config = func() Config { return Config{Interval: time.Nanosecond, PinnedOver: time.Nanosecond}.WithDefaults() }

	// First: it waits for the end of every transaction that is under way.
	db.Exec(`SELECT pg_create_logical_replication_slot('decoder', 'test_decoding')`)

	connect(db, "harmless", `BEGIN`, `SELECT count(*) FROM outbox`) // read committed, and no snapshot between statements
	connect(db, "writer", `BEGIN`, `SELECT pg_current_xact_id()`)
	connect(db, "reader", `BEGIN ISOLATION LEVEL REPEATABLE READ`, `SELECT count(*) FROM outbox`)
	connect(db, "outbox-relay", `BEGIN`, `SELECT pg_current_xact_id()`) // a relay of this role
	connect(db, "preparer", `BEGIN`, `SELECT pg_current_xact_id()`, `PREPARE TRANSACTION 'left <behind>'`)
	db.Exec(`SELECT pg_create_physical_replication_slot('stuck', true)`)
	feedBack(db, "stuck", uint32(relaytest.Row[int64](db, `SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint`)))

	names := func(w Watch) (all []string) {
		for _, h := range w.VacuumBlockers {
			all = append(all, strings.Trim(h.Kind+" "+h.Application+h.Name+" "+h.User+" "+h.State, " "))
		}
		slices.Sort(all)
		return all
	}
	user := relaytest.Row[string](db, `SELECT current_user`)
	want := []string{"prepared left <behind> " + user, "session reader " + user + " idle in transaction", "session writer " + user + " idle in transaction"}
	if got := names(look(t, w)); !slices.Equal(got, want) {
		t.Errorf("vacuum blockers %q, want %q", got, want)
	}
	// A slot counts once transactions have passed it by.
	db.Exec(`DO $$ BEGIN FOR i IN 1..1100 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$`)
	want = append([]string{"catalog slot decoder"}, append(want, "slot stuck")...)
	seen := look(t, w)
	if got := names(seen); !slices.Equal(got, want) {
		t.Errorf("vacuum blockers %q, want %q", got, want)
	}
	for _, h := range seen.VacuumBlockers {
		if text := h.String(); h.For <= 0 || strings.ContainsAny(text, "\n") || h.Kind == "session" && !strings.Contains(text, fmt.Sprintf("pg_terminate_backend(%d)", h.PID)) {
			t.Errorf("%+v: %s", h, text)
		}
	}
	// The time for which a slot stays where it is continues from look to look.
	since := `SELECT t ->> 'since' FROM outbox_watch, jsonb_array_elements(sample -> 'tracked') t WHERE t ->> 'name' = 'stuck'`
	if before := relaytest.Row[string](db, since); look(t, w).At.IsZero() || relaytest.Row[string](db, since) != before {
		t.Error("a slot that did not move is said to have moved")
	}
	testkit.Contains(t, "pressure", w.Pressure(), "VACUUM")
}

// feedBack tells the server as a standby does, with hot_standby_feedback, up to where its queries
// need old rows.
func feedBack(db *relaytest.Database, slot string, xmin uint32) {
	db.Helper()
	cfg, err := pgconn.ParseConfig(db.DSN)
	relaytest.Must(db, err)
	cfg.RuntimeParams["replication"] = "true"
	conn, err := pgconn.ConnectConfig(db.Context(), cfg)
	relaytest.Must(db, err)
	at := relaytest.Row[string](db, `SELECT pg_current_wal_flush_lsn()::text`)
	conn.Frontend().SendQuery(&pgproto3.Query{String: "START_REPLICATION SLOT " + slot + " PHYSICAL " + at})
	relaytest.Must(db, conn.Frontend().Flush())
	for {
		message, err := conn.ReceiveMessage(db.Context())
		relaytest.Must(db, err)
		if _, ok := message.(*pgproto3.CopyBothResponse); ok {
			break
		}
	}
	message := binary.BigEndian.AppendUint64([]byte{'h'}, 0)
	for _, number := range []uint32{xmin, 0, 0, 0} { // the epochs are 0; nothing about catalogues
		message = binary.BigEndian.AppendUint32(message, number)
	}
	conn.Frontend().Send(&pgproto3.CopyData{Data: message})
	relaytest.Must(db, conn.Frontend().Flush())
	relaytest.Becomes(db, true, `SELECT xmin IS NOT NULL FROM pg_replication_slots WHERE slot_name = $1`, slot)
	relaytest.Must(db, conn.Close(db.Context()))
	relaytest.Becomes(db, false, `SELECT active FROM pg_replication_slots WHERE slot_name = $1`, slot)
}

// Without the right to see them, other roles' sessions are counted, and the alert says what to
// grant.
func TestHiddenSessionsAreAdmitted(t *testing.T) {
	t.Parallel()
	db := alone(t, nil)
	db.Exec(migrations.Roles())
	db.Exec(`CREATE ROLE plain LOGIN; GRANT outbox_relay TO plain`)
	other := connect(db, "other", `BEGIN; SELECT pg_current_xact_id()`)
	dsn := strings.Replace(db.DSN, relaytest.Row[string](db, `SELECT current_user::text`)+"@", "plain@", 1)
	w := newWatcher(t, enginePool(t, dsn), alert.Config{VacuumBlockedOver: time.Nanosecond})
	look(t, w)
	db.Exec(`SELECT pg_current_xact_id()`)
	for _, c := range []struct {
		grant, want string
		hidden      bool
	}{
		{`SELECT 1`, "GRANT pg_read_all_stats", true},
		{`GRANT pg_read_all_stats TO plain`, fmt.Sprintf("process %d ", other.PgConn().PID()), false},
	} {
		db.Exec(c.grant)
		seen := look(t, w)
		detail := relaytest.Row[string](db, `SELECT detail FROM outbox_alert WHERE rule = 'vacuum_blocked'`)
		if (seen.HiddenSessions > 0) != c.hidden || !strings.Contains(detail, c.want) {
			t.Errorf("%d hidden sessions, the alert says %q", seen.HiddenSessions, detail)
		}
	}
}
