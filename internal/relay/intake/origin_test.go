package intake

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Events restored on another server have transaction ids that say nothing there. The guard refuses,
// and Rebase makes all of them pending or leaves them settled, whatever is inserted meanwhile.
func TestForeignIDs(t *testing.T) {
	t.Parallel()
	for name, shift := range map[string]int64{"from the future": 1_000_000, "from the past": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRoom(t)
			r.Route("other")
			relaytest.Must(t, CheckOrigin(t.Context(), r.pool))
			for i, key := range []string{"settled", "half", "in hand", "untaken"} {
				r.Exec(insertKeyed, key, "k")
				if i < 3 {
					got := r.take(1, usual)
					s := settlement(1, got, got.Events[:min(2-i, 1)])
					if i > 0 {
						s.Ended = nil
					}
					if i == 0 {
						other := s.Deliveries[0]
						other.Destination = "other"
						s.Deliveries = append(s.Deliveries, other)
					}
					_, err := SettleRanges(t.Context(), r.pool, s)
					relaytest.Must(t, err)
				}
			}
			r.Exec(`CREATE FUNCTION shifted(s pg_snapshot, by bigint) RETURNS text LANGUAGE sql AS $$
				SELECT (pg_snapshot_xmin(s)::text::bigint + by) || ':' || (pg_snapshot_xmax(s)::text::bigint + by) || ':' ||
					coalesce((SELECT string_agg((x::text::bigint + by)::text, ',' ORDER BY x) FROM pg_snapshot_xip(s) x), '') $$`)
			// As restored from a server whose counter is ahead: all ids are shifted.
			r.Exec(fmt.Sprintf(`UPDATE outbox SET xid = (xid::text::bigint + %[1]d)::text::xid8;
				UPDATE outbox_range SET base = (shifted(base, %[1]d))::pg_snapshot, target = (shifted(target, %[1]d))::pg_snapshot;
				UPDATE outbox_intake SET system_identifier = system_identifier - 1`, shift))
			open := r.Begin()
			_, err := open.Exec(t.Context(), insertOne, "open")
			relaytest.Must(t, err)
			r.Exec(insertOne, "before")

			foreign, ok := errors.AsType[*ForeignError](CheckOrigin(t.Context(), r.pool))
			if !ok || foreign.IsFailover() || foreign.Future != (shift > 0) || !strings.Contains(foreign.Error(), "system identifier") {
				t.Fatalf("%+v", foreign)
			}
			if err := AcceptTimeline(t.Context(), r.pool, foreign); err == nil {
				t.Error("accepted as a failover")
			}
			n, err := Rebase(t.Context(), r.pool, foreign.Found, 2)
			relaytest.Must(t, err)
			if n != 7 { // half's other, in hand, untaken, before
				t.Errorf("%d deliveries were made", n)
			}
			relaytest.Must(t, CheckOrigin(t.Context(), r.pool))
			r.find(2, Nothing)
			if n := relaytest.Row[int](r.Database, `SELECT count(*)::int FROM outbox e WHERE NOT pg_visible_in_snapshot(e.xid,
				(SELECT target FROM outbox_range ORDER BY seq DESC LIMIT 1))`); n != 0 {
				t.Errorf("%d events would be taken some day", n)
			}
			relaytest.Must(t, open.Commit(t.Context()))
			r.Exec(insertOne, "after")
			r.wantTaken(2, "open after")
			got := relaytest.Rows[string](r.Database, `SELECT e.idempotency_key || ' ' || string_agg(d.destination || ' ' || d.status, ', ' ORDER BY d.destination)
				FROM outbox e JOIN outbox_delivery d ON d.event_id = e.id GROUP BY e.id ORDER BY e.id`)
			if want := []string{
				"settled default delivered, other delivered", "half default delivered, other pending", "in hand default pending, other pending",
				"untaken default pending, other pending", "before default pending, other pending",
			}; !slices.Equal(got, want) {
				t.Errorf("%q", got)
			}
		})
	}
}

// Several relays find the ids foreign. Once one of them has begun again and takes, the others leave
// what it has in hand alone, and wait for no more than a batch of theirs.
func TestOneRelayRebases(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(`UPDATE outbox_intake SET system_identifier = 1`)
	r.Exec(insertOne, "before")
	foreign, ok := errors.AsType[*ForeignError](CheckOrigin(t.Context(), r.pool))
	if !ok {
		t.Fatal("the ids are not foreign")
	}
	batch := r.Begin()
	_, err := batch.Exec(t.Context(), coverEvents, 0, 10, "3:3:", foreign.Found.recordedBefore)
	relaytest.Must(t, err)
	rebased := make(chan error, 1)
	go func() {
		_, err := Rebase(t.Context(), r.Pool, foreign.Found, 10)
		rebased <- err
	}()
	relaytest.Becomes(r.Database, true, `SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`)
	r.Exec(`UPDATE outbox_intake SET routes = routes + 1`) // no pause of a destination waits for it
	relaytest.Must(t, batch.Commit(t.Context()))
	relaytest.Must(t, <-rebased)

	r.Exec(insertOne, "in hand")
	r.wantTaken(1, "in hand")
	n, err := Rebase(t.Context(), r.pool, foreign.Found, 10)
	relaytest.Must(t, err)
	open := relaytest.Row[int](r.Database, `SELECT count(*) FROM outbox_range WHERE ended_at IS NULL`)
	if n != 0 || open != 1 {
		t.Errorf("%d deliveries were made, and %d ranges are open", n, open)
	}
}

// A real dump, restored on another server.
func TestRestoredDump(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(insertMany, "e", 20)
	r.take(1, Terms{Events: 5, Inline: 1 << 20})
	there := pgtest.Start(t, localpg.Options{})
	dump, restore := pgtest.Program(t, "pg_dump"), pgtest.Program(t, "psql")
	file := t.TempDir() + "/dump.sql"
	run(t, dump, "-f", file, "-d", r.DSN)
	run(t, restore, "-q", "-X", "-v", "ON_ERROR_STOP=1", "-f", file, "-d", there.DSN(""))
	pool := relayPool(t, there.DSN(""))
	err := CheckOrigin(t.Context(), pool)
	foreign, ok := errors.AsType[*ForeignError](err)
	if !ok || foreign.IsFailover() {
		t.Fatal(err)
	}
	n, err := Rebase(t.Context(), pool, foreign.Found, 7)
	relaytest.Must(t, err)
	relaytest.Must(t, CheckOrigin(t.Context(), pool))
	_, err = pool.Exec(t.Context(), insertOne, "there")
	relaytest.Must(t, err)
	got, err := TakeRange(t.Context(), pool, 1, usual, false)
	relaytest.Must(t, err)
	if n != 20 || keys(got.Events) != "there" {
		t.Errorf("%d deliveries; took %q", n, keys(got.Events))
	}
}

// A promoted standby has another timeline, and ids that continue.
func TestFailover(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(insertOne, "a")
	r.settle(1, r.take(1, usual))
	r.Exec(`UPDATE outbox_intake SET timeline = 7`)
	foreign, ok := errors.AsType[*ForeignError](CheckOrigin(t.Context(), r.pool))
	if !ok || !foreign.IsFailover() || !strings.Contains(foreign.Error(), "the timeline is 1, recorded is 7") {
		t.Fatalf("%+v", foreign)
	}
	relaytest.Must(t, AcceptTimeline(t.Context(), r.pool, foreign))
	relaytest.Must(t, CheckOrigin(t.Context(), r.pool))
	r.Exec(insertOne, "b")
	r.wantTaken(1, "b")
}

// savepoints runs each query after a savepoint, to which a failed one returns, as if the
// transaction were a connection.
type savepoints struct{ pgx.Tx }

func (s savepoints) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if _, err := s.Exec(ctx, `ROLLBACK TO s`); err != nil {
		panic(err)
	}
	return s.Tx.QueryRow(ctx, sql, args...)
}

// A server that does not show its control file, and an outbox that has lost its row.
func TestCheckOriginUnknown(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(`GRANT USAGE ON SCHEMA public TO pg_read_all_data; REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC`)
	relaytest.Must(t, pgx.BeginFunc(t.Context(), r.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `SET LOCAL ROLE pg_read_all_data; SAVEPOINT s`); err != nil {
			return err
		}
		return CheckOrigin(t.Context(), savepoints{tx})
	}))
	r.Exec(`UPDATE outbox_intake SET system_identifier = 0, timeline = 0`)
	relaytest.Must(t, CheckOrigin(t.Context(), r.pool))
	r.Exec(`DELETE FROM outbox_intake`)
	testkit.ErrorIs(t, "error", CheckOrigin(t.Context(), r.pool), ErrNoIntake)
}

func run(t *testing.T, program string, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", program, err, out)
	}
}
