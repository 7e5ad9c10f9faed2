package inbox_test

import (
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// oldRecorded are n events of 91 days ago, which an inbox recorded and has worked, and their
// effects.
func oldRecorded(e *receivertest.Env, source, key string, n int) {
	e.T.Helper()
	e.MustExec(`INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state, received_at, processed_at, payload)
		SELECT 'test', $1, $2 || i, 'succeeded', now() - interval '91 days', now() - interval '91 days', '{}' FROM generate_series(1, $3) i`, source, key, n)
	e.MustExec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at, payload_hash)
		SELECT 'test', $1, $2 || i, 'recorded', now() - interval '91 days', sha256('{}') FROM generate_series(1, $3) i`, source, key, n)
	e.MustExec(`INSERT INTO effect (key) SELECT $1 || i FROM generate_series(1, $2) i`, key, n)
}

// wantTables compares how many rows there are in the memory and in the inbox.
func wantTables(e *receivertest.Env, remembered, inInbox int) {
	e.T.Helper()
	if n, m := e.Known(), e.Count("SELECT count(*) FROM inbox_events"); n != remembered || m != inInbox {
		e.T.Errorf("%d events are remembered, and %d in the inbox; want %d and %d", n, m, remembered, inInbox)
	}
}

func TestPruneAsksTheInbox(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		remembered, inInbox, gone := 0, 0, 0
		for i, row := range []struct {
			receiver, state, received, processed, notAfter string // the state in the inbox; empty: it is not there any more
			kept                                           bool
		}{
			{"test", "succeeded", "91 days", "91 days", "", false},
			{"test", "ignored", "91 days", "91 days", "", false},
			{"test", "succeeded", "91 days", "91 days", "1 minute", false},
			{"test", "", "91 days", "", "", false},
			{"test", "failed", "91 days", "91 days", "", true},
			{"test", "pending", "91 days", "", "", true},
			{"test", "processing", "91 days", "", "", true},
			{"test", "succeeded", "91 days", "89 days", "", true}, // after a long time in the inbox
			{"test", "succeeded", "89 days", "89 days", "", true},
			{"test", "succeeded", "91 days", "91 days", "-1 minute", true},
			{"test", "", "89 days", "", "", true},
			{"test", "", "91 days", "", "-1 minute", true},
			{"other", "succeeded", "91 days", "91 days", "", true},
			{"other", "", "91 days", "", "", true},
		} {
			key := fmt.Sprint(i, "/")
			e.MustExec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at, not_after)
				SELECT $1, 'outbox', $2 || i, 'recorded', now() - $3::interval, now() - nullif($4, '')::interval FROM generate_series(1, 100) i`,
				row.receiver, key, row.received, row.notAfter)
			if row.state != "" {
				e.MustExec(`INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state, received_at, processed_at)
					SELECT $1, 'outbox', $2 || i, $3, now() - $4::interval, now() - nullif($5, '')::interval FROM generate_series(1, 100) i`,
					row.receiver, key, row.state, row.received, row.processed)
			}
			switch {
			case !row.kept:
				gone += 100
			case row.state != "":
				inInbox += 100
				fallthrough
			default:
				remembered += 100
			}
		}
		everything := func() []string {
			return tableRows(e, "SELECT idempotency_key || p::text || e::text FROM processed_events p FULL JOIN inbox_events e USING (receiver, source, idempotency_key) ORDER BY 1")
		}
		before := everything()
		cfg := receivertest.Ninety()
		cfg.BatchPages, cfg.Pause = 1, time.Microsecond
		e.WantPruned(cfg, 0, int64(gone))
		e.Settle()
		testkit.Equal(t, "removals of a dry run", e.Count("SELECT (inbox_prune('test', 0, 1000, interval '90 days', true)->>'removed')::int"), gone)
		if !slices.Equal(everything(), before) {
			t.Error("something was changed before it was announced, or in a dry run")
		}
		e.WantPruned(cfg, int64(gone), 0)
		wantTables(e, remembered, inInbox)
		testkit.Equal(t, "events in the inbox and not remembered", e.Count(`SELECT count(*) FROM inbox_events e WHERE NOT EXISTS (SELECT FROM processed_events p WHERE p.receiver = e.receiver AND p.source = e.source AND p.idempotency_key = e.idempotency_key)`), 0)
		testkit.Equal(t, "another receiver's events were announced", e.Count(`SELECT count(*) FROM inbox_forgotten WHERE receiver <> 'test'`), 0)
	})
}

// What another session has locked, of the inbox or of the memory, is left for the next run, which
// does not wait.
func TestPruneLeavesWhatIsInHandInAnInbox(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	p.Prune = receivertest.PGX().Prune
	p.Pool = receivertest.PoolOf(t, p.DSN, 6) // one for each lock
	oldRecorded(p.Env, "outbox", "old", 9)
	p.WantPruned(receivertest.Ninety(), 0, 9)
	p.Settle()
	var release []func()
	for _, statement := range []string{
		`SELECT FROM inbox_events WHERE idempotency_key = 'old2' FOR UPDATE`,
		`UPDATE inbox_events SET processing_state = 'pending', next_attempt_at = now() WHERE idempotency_key = 'old4'`,
		`SELECT pg_advisory_xact_lock(hashtextextended(E'test\noutbox\nold6', 122550254464888 # 'processed_events'::regclass::oid::bigint))`,
		`SELECT FROM processed_events WHERE idempotency_key = 'old8' FOR UPDATE`,
	} {
		release = append(release, p.Hold(func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), statement)
			return err
		}))
	}
	p.WantPruned(receivertest.Ninety(), 5, 0)
	wantTables(p.Env, 4, 2)
	for key, state := range map[string]string{"old2": "succeeded", "old4": "succeeded", "old6": "recorded", "old8": "recorded"} {
		receivertest.WantReplayed(t, p.Do(p.NewRequest(key, "{}", receivertest.LongAgo())), http.StatusOK, `{"state":"`+state+`"}`+"\n")
	}
	for _, commit := range release {
		commit()
	}
	p.WantPruned(receivertest.Ninety(), 3, 0)
	wantTables(p.Env, 1, 1)
	p.run() // it was replayed
	p.awaitState("old4", inbox.StateSucceeded)
	p.WantRows("old4", 2, 1)
	p.WantRows("old6", 1, 0)
}

// A duplicate that meets a removal which is not committed yet is answered from what is there; a
// request that comes later is refused.
func TestDuplicateMeetsRemovalFromAnInbox(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	p.Prune = receivertest.PGX().Prune
	oldRecorded(p.Env, "outbox", "old", 1)
	p.WantPruned(receivertest.Ninety(), 0, 1)
	p.Settle()
	commit := p.Hold(func(tx pgx.Tx) error {
		var removed int
		err := tx.QueryRow(t.Context(), `SELECT (inbox_prune(NULL, 0, 16, interval '90 days', false)->>'removed')::int`).Scan(&removed)
		testkit.Equal(t, "removed", removed, 1)
		return err
	})
	receivertest.WantReplayed(t, p.Do(p.NewRequest("old1", "{}", receivertest.LongAgo())), http.StatusOK, `{"state":"succeeded"}`+"\n")
	commit()
	receivertest.WantProblem(t, p.Do(p.NewRequest("old1", "{}", receivertest.LongAgo())), http.StatusUnprocessableEntity, "forgotten")
	p.WantRows("old1", 1, 0)
	wantTables(p.Env, 0, 0)
}

// However large the inbox is: its events are found by their keys. Statistics from when it was
// empty, and none at all, must not change that.
func TestPruneFindsEventsByTheirKeys(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{}, receivertest.Effect)
	e.MustExec(`ALTER TABLE processed_events SET (autovacuum_enabled = off)`)
	e.MustExec(`ALTER TABLE inbox_events SET (autovacuum_enabled = off)`)
	e.MustExec(`VACUUM ANALYZE`)
	conn, err := pgx.Connect(t.Context(), e.DSN)
	pgtest.Must(t, err)
	t.Cleanup(func() { _ = conn.Close(t.Context()) })
	page := 0
	run := func() (removed int) {
		t.Helper()
		for range 8 { // more than five times, after which a plan is kept
			var n int
			pgtest.Must(t, conn.QueryRow(t.Context(), `SELECT (p->>'next_page')::bigint, (p->>'removed')::int FROM inbox_prune(NULL, $1, 4, interval '90 days', false) p`, page).Scan(&page, &n))
			removed += n
		}
		return removed
	}
	run()
	page = 0
	oldRecorded(e, "outbox", "old", 30_000)
	e.MustExec(`INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at) VALUES ('test', 'outbox', now() - interval '90 days', now() - interval '1 day')`)
	for _, statistics := range []string{"none", "fresh"} {
		if statistics == "fresh" {
			e.MustExec(`VACUUM ANALYZE`)
		}
		// The server counts the reads of the last transactions too, until it has passed them on: at
		// most once a second.
		pgtest.Exec(t, conn, `BEGIN; CREATE TEMP TABLE noted ON COMMIT DROP AS SELECT * FROM pg_stat_xact_user_tables`)
		removed := run()
		if removed == 0 {
			t.Error("nothing is removed")
		}
		rows, err := conn.Query(t.Context(), `SELECT format('%s: %s sequential scans, %s rows', relname, seq_scan, idx_tup_fetch)
			FROM (SELECT x.relname, x.seq_scan - n.seq_scan AS seq_scan, x.idx_tup_fetch - n.idx_tup_fetch AS idx_tup_fetch
				FROM pg_stat_xact_user_tables x JOIN noted n USING (relid)) reads
			WHERE relname IN ('processed_events', 'inbox_events') AND (seq_scan > 0 OR idx_tup_fetch > 4 * $1::int)`, removed)
		pgtest.Must(t, err)
		wrong, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil || len(wrong) > 0 {
			t.Errorf("with statistics %s, for %d removed: %q, %v", statistics, removed, wrong, err)
		}
		pgtest.Exec(t, conn, `COMMIT`)
	}
}
