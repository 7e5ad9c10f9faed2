package identity_test

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// watched returns a pool that the guard of a relay watches.
func watched(r *relay, dsn string, pooled bool) *pgxpool.Pool {
	r.db.Helper()
	return pgtest.PoolWith(r.db, dsn, func(cfg *pgxpool.Config) { r.Watch(cfg, pg.NewNames("", "outbox"), pooled) })
}

// turning returns a pool that leads to one database, and from the call of turn on to another one,
// as the host of both.
func turning(r *relay, from, to *relaytest.Database, pooled bool) (pool *pgxpool.Pool, turn func(back bool)) {
	r.db.Helper()
	other, err := pgx.ParseConfig(to.DSN)
	relaytest.Must(r.db, err)
	var turned atomic.Bool
	pool = pgtest.PoolWith(r.db, from.DSN, func(cfg *pgxpool.Config) {
		cfg.BeforeConnect = func(_ context.Context, conn *pgx.ConnConfig) error {
			if turned.Load() {
				conn.Host, conn.Port, conn.Database = other.Host, other.Port, other.Database
			}
			return nil
		}
		r.Watch(cfg, pg.NewNames("", "outbox"), pooled)
	})
	return pool, func(back bool) {
		turned.Store(!back)
		pool.Reset()
	}
}

// Each way of copying a database in which a relay ran, that relay's row with it: a relay on the
// copy runs no statement and shows that it waits, until an operator accepts the copy.
func TestCopies(t *testing.T) {
	t.Parallel()
	original := func(t *testing.T) *relaytest.Database {
		db := relaytest.Covered(t)
		visited(db)
		db.Exec(`INSERT INTO outbox_relay (name, version, session_pid) VALUES ('original', 'v1', 0)`)
		return db
	}
	for name, test := range map[string]struct {
		copy func(t *testing.T) *relaytest.Database
		want string
	}{
		"template": {func(t *testing.T) *relaytest.Database { return original(t).FromTemplate() }, "database oid"},
		"dump into the same server": {func(t *testing.T) *relaytest.Database {
			return original(t).Dump(pgtest.New(t))
		}, "database oid"},
		"dump into another server": {func(t *testing.T) *relaytest.Database {
			testsize.Long(t)
			return original(t).Dump(pgtest.Start(t, localpg.Options{}).DSN(""))
		}, "system identifier"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			copied := test.copy(t)
			const recorded = `SELECT i::text FROM outbox_identity i`
			before := relaytest.Row[string](copied, recorded)
			report, err := identity.Compare(t.Context(), copied.Pool, poolAddress(copied.Pool), "")
			relaytest.Must(t, err)
			if report.Reason() == "" || report.Discardable() != nil { // also before a relay comes
				t.Errorf("%+v: %v", report, report.Discardable())
			}
			r := comes(copied, identity.Config{})
			r.wantQuarantine(test.want)
			testkit.ErrorIs(t, "a statement on a copy", watched(r, copied.DSN, false).Ping(t.Context()), identity.ErrGuarded)
			relaytest.Becomes(copied, true, `SELECT detail LIKE '%outbox-relay identity accept%' FROM outbox_alert WHERE rule = 'quarantined' AND resolved_at IS NULL`)
			beat := relaytest.Row[string](copied, `SELECT heartbeat_at::text FROM outbox_relay WHERE quarantined IS NOT NULL`)
			relaytest.Becomes(copied, true, `SELECT heartbeat_at > $1::timestamptz FROM outbox_relay WHERE quarantined IS NOT NULL`, beat)
			if after := relaytest.Row[string](copied, recorded); after != before {
				t.Errorf("%s became %s", before, after)
			}
			if r.change(func() {}); r.alerts != 1 {
				t.Errorf("alerts were due %d times", r.alerts)
			}
			_, err = identity.Accept(t.Context(), copied.Pool, poolAddress(copied.Pool), "", nil)
			relaytest.Must(t, err)
			r.works()
			relaytest.Becomes(copied, true, `SELECT resolved_at IS NOT NULL FROM outbox_alert WHERE rule = 'quarantined'`)
			relaytest.Becomes(copied, 0, `SELECT count(*) FROM outbox_relay WHERE quarantined IS NOT NULL`)
		})
	}
}

// A standby that takes over, at the address that relays know, is the same database; its timeline is
// recorded. At another address it is a copy, although nothing else tells it from the original.
func TestPromotedStandby(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	server, db := relaytest.Serve(t, localpg.Options{})
	const here = "primary:5432/app"
	first := comes(db, identity.Config{Address: here})
	first.works()
	_, standby := relaytest.Serve(t, localpg.Options{CopyOf: pgtest.BaseBackup(t, server, true)})
	testkit.ErrorIs(t, "a standby that takes no writes", first.Await(t.Context(), standby.Pool), pg.ErrReadOnly)
	standby.Exec(`SELECT pg_promote()`)
	standby.Exec(`CHECKPOINT`)
	elsewhere := comes(standby, identity.Config{Address: "elsewhere:5432/app"})
	elsewhere.wantQuarantine("its address is elsewhere:5432/app, recorded is " + here)
	testkit.Equal(t, "quarantined after a failover", comes(standby, identity.Config{Address: here}).works(), 0)
	if timeline := relaytest.Row[int](standby, `SELECT timeline FROM outbox_identity`); timeline != 2 {
		t.Errorf("timeline %d is recorded", timeline)
	}
}

// A running relay's pool leads to a copy, though its session does not: no statement is run there.
// Back again, they are.
func TestPoolThatLeadsToACopy(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	visited(db)
	copied := db.FromTemplate()
	db = relaytest.At(t, db.DSN)
	r := comes(db, identity.Config{})
	r.works()
	pool, turn := turning(r, db, copied, false)
	relaytest.Must(t, pool.Ping(t.Context()))
	turn(false)
	testkit.ErrorContains(t, "on the copy", pool.Ping(t.Context()), "not on the server that this connection leads to")
	if err := pool.Ping(identity.Unguarded(t.Context())); err != nil {
		t.Errorf("unguarded: %v", err)
	}
	turn(true)
	relaytest.Must(t, pool.Ping(t.Context()))
}

// A server that was restarted has not the session that the relay takes for living. That is no
// second server.
func TestSessionThatEndedUnnoticed(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := comes(db, identity.Config{Unnoticed: time.Hour})
	r.works()
	pool := watched(r, db.DSN, false)
	r.Admit(99) // which has no session here
	testkit.ErrorIs(t, "without the session", pool.Ping(t.Context()), identity.ErrGuarded)
}

// A pooler may lead elsewhere from one statement to the next: none is run there, whether or not the
// server tells its identifier. The relay's session notices, too.
func TestPoolerThatLeadsToACopy(t *testing.T) {
	t.Parallel()
	original := relaytest.Covered(t)
	original.Exec(`REVOKE EXECUTE ON FUNCTION pg_control_system(), pg_control_checkpoint() FROM PUBLIC`)
	login := loginOf(original)
	visited(original)
	copied := original.FromTemplate()
	for name, dsn := range map[string]string{"a server that tells its identifier": original.DSN, "one that does not": login} {
		db := relaytest.At(t, dsn)
		r := comes(db, identity.Config{})
		r.works()
		pool, turn := turning(r, db, copied, true)
		through := pg.NewTransactions(pool, map[string]string{"work_mem": "7MB"}, r.Prologue, identity.Explain)
		run := func() (memory string, err error) {
			err = through.QueryRow(t.Context(), `SELECT current_setting('work_mem')`).Scan(&memory)
			return memory, err
		}
		if memory, err := run(); err != nil || memory != "7MB" {
			t.Errorf("%s: %s, %v", name, memory, err)
		}
		relaytest.Must(t, r.Recheck(t.Context(), r.conn, through, true))
		turn(false)
		if _, err := run(); err == nil || !strings.Contains(err.Error(), "not on the server that this connection leads to") {
			t.Errorf("%s, on the copy: %v", name, err)
		}
		if tx, err := through.Begin(t.Context()); err == nil || tx != nil {
			t.Errorf("%s: a transaction on the copy: %v", name, err)
		}
		if err := r.Recheck(t.Context(), r.conn, through, true); err == nil {
			t.Errorf("%s: the session does not notice", name)
		}
		if err := r.Recheck(t.Context(), through, through, false); !errors.Is(err, identity.ErrQuarantined) {
			t.Errorf("%s: without a session: %v", name, err)
		}
		r.stop()
	}
}

// loginOf returns the DSN of a login that is no superuser, with all rights on the tables.
func loginOf(db *relaytest.Database) string {
	db.Helper()
	db.Exec(`DO $$ BEGIN CREATE ROLE no_superuser LOGIN; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$`)
	db.Exec(`GRANT ALL ON ALL TABLES IN SCHEMA public TO no_superuser`)
	u, err := url.Parse(db.DSN)
	relaytest.Must(db, err)
	u.User = url.User("no_superuser")
	return u.String()
}

// A server that tells strangers nothing of its control file: what is left is compared.
func TestServerThatTellsNothing(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`REVOKE EXECUTE ON FUNCTION pg_control_system(), pg_control_checkpoint() FROM PUBLIC`)
	untold := relaytest.At(t, loginOf(db))
	visited(untold)
	testkit.Equal(t, "recorded", relaytest.Row[string](db, `SELECT concat_ws(' ', system_identifier, timeline, database_oid > 0) FROM outbox_identity`), "0 0 t")
	visited(db) // a superuser
	if !relaytest.Row[bool](db, `SELECT system_identifier <> 0 AND timeline = 1 FROM outbox_identity`) {
		t.Error("what the server tells now is not recorded")
	}
	comes(untold, identity.Config{Environment: "production"}).works() // which keeps it, beside news
	if !relaytest.Row[bool](db, `SELECT system_identifier <> 0 AND timeline = 1 AND environment = 'production' FROM outbox_identity`) {
		t.Error("what was recorded is lost")
	}
}

// Who looks at the original from elsewhere may not give up its events.
func TestOriginalSeenFromElsewhere(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	report, err := identity.Compare(t.Context(), db.Pool, poolAddress(db.Pool), "")
	relaytest.Must(t, err)
	if report.Recorded != nil || report.Reason() != "" || !errors.Is(report.Discardable(), identity.ErrNotQuarantined) {
		t.Errorf("of a database that no relay has seen: %+v", report)
	}
	visited(db)
	u, err := url.Parse(db.DSN)
	relaytest.Must(t, err)
	query := u.Query()
	query.Set("host", query.Get("host")+"/.")
	u.RawQuery = query.Encode()
	for dsn, differences := range map[string]int{db.DSN: 0, u.String(): 1} {
		report, err := identity.Compare(t.Context(), pgtest.Pool(t, dsn), poolAddress(pgtest.Pool(t, dsn)), "")
		relaytest.Must(t, err)
		if len(report.Differences) != differences || differences == 1 && report.Differences[0].What != "address" || report.Reason() != "" {
			t.Errorf("%+v", report)
		}
		testkit.ErrorIs(t, "discarding", report.Discardable(), identity.ErrNotQuarantined)
	}
}

func poolAddress(pool *pgxpool.Pool) string { return identity.Address(pool.Config().ConnConfig) }
