package intake

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// slowed returns a pool whose statements stop after their snapshot, at the first row that they read
// of a table. between runs f while one of them stands there, and lets them continue.
func (r *room) slowed(table string) (slow *pgxpool.Pool, between func(f func())) {
	r.Helper()
	role := fmt.Sprintf("slow_%x", rand.Uint64())
	r.Exec(fmt.Sprintf(`
CREATE ROLE %[1]s; GRANT SELECT, UPDATE ON ALL TABLES IN SCHEMA public TO %[1]s;
CREATE FUNCTION waits() RETURNS boolean LANGUAGE plpgsql SET lock_timeout = 0 AS $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN true; END $$;
ALTER TABLE %[2]s ENABLE ROW LEVEL SECURITY;
CREATE POLICY waits ON %[2]s TO %[1]s USING (waits())`, role, table))
	lock := r.Begin()
	_, err := lock.Exec(r.Context(), `SELECT pg_advisory_xact_lock(7)`)
	relaytest.Must(r, err)
	slow = pgtest.PoolWith(r, r.DSN, func(cfg *pgxpool.Config) {
		pg.SetDirect(cfg, "")
		cfg.ConnConfig.RuntimeParams["role"] = role
	})
	return slow, func(f func()) {
		r.Helper()
		relaytest.Eventually(r, "the slow statement has begun", func() bool {
			return relaytest.Row[bool](r.Database, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory')`)
		})
		f()
		relaytest.Must(r, lock.Rollback(r.Context()))
	}
}

// The statement of a take-over sees outbox_relay as it began, and a range as it is. Between the two
// another relay may have registered and taken the range over.
func TestRangeIsTakenOverOnce(t *testing.T) {
	t.Parallel()
	r := newRoom(t)
	r.Exec(insertMany, "e", 1)
	first := r.take(1, usual)
	r.Exec(`DELETE FROM outbox_relay WHERE id IN (1, 3)`)
	slow, between := r.slowed("outbox_range")
	late := make(chan string, 1)
	go func() {
		_, found, err := RescueRange(context.WithoutCancel(t.Context()), slow, 2, nil, 1<<20)
		late <- fmt.Sprint(found, err)
	}()
	between(func() {
		r.Exec(`INSERT INTO outbox_relay (id, name, version) OVERRIDING SYSTEM VALUE SELECT 3, name, version FROM outbox_relay WHERE id = 4`)
		if got, found, err := RescueRange(t.Context(), r.pool, 3, nil, 1<<20); err != nil || !found || got.Seq != first.Seq {
			t.Errorf("%+v, %v, %v", got, found, err)
		}
	})
	if got := <-late; got != "false <nil>" {
		t.Errorf("the late relay took the range of a living one: %s", got)
	}
}

// A range with a key is taken while what was due before joins the key. One of the two must know of
// the other: the join of the range, or the taker of the rows that are locked.
func TestJoinMeetsATake(t *testing.T) {
	t.Parallel()
	scheduled := func(t *testing.T) *room {
		r := newRoom(t)
		r.Exec(insertMany, "e", 1)
		r.take(1, usual)
		r.Exec(`UPDATE outbox_range SET ended_at = now()`)
		r.Exec(`INSERT INTO outbox_delivery (event_id, destination, ordering_key, joined, next_attempt_at) VALUES (1, 'default', 'k', NULL, now() - interval '1 second')`)
		return r
	}
	// The event of the range was due before the row.
	take := func(r *room) Blocked {
		r.Helper()
		r.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key) VALUES ('t', '{}', 'new', 'k')`)
		of := r.take(2, usual)
		blocked, err := FindBlockedKeys(r.Context(), r.pool, 2, of.Ref(), []int64{of.Fence}, []Key{{Key: "k", Destination: "default", Due: time.Now().Add(-time.Minute)}})
		relaytest.Must(r, err)
		return blocked[0]
	}
	join := func(t *testing.T, db pg.Pool) Joined {
		t.Helper()
		done, err := JoinKeys(context.WithoutCancel(t.Context()), db, 0, []Key{{Key: "k", Destination: "default"}}, time.Now(), 10)
		if err != nil {
			t.Error(err)
			return Joined{}
		}
		return done[0]
	}
	t.Run("the take is first", func(t *testing.T) {
		t.Parallel()
		r := scheduled(t)
		slow, between := r.slowed("outbox_delivery")
		joined := make(chan Joined, 1)
		go func() { joined <- join(t, slow) }()
		between(func() {
			if got := take(r); got != (Blocked{}) {
				t.Errorf("the range is blocked: %+v", got)
			}
		})
		if got := <-joined; got.Rows > 0 || !got.InHand {
			t.Errorf("it joined the key of a range that is being sent: %+v", got)
		}
	})
	t.Run("the join is first", func(t *testing.T) {
		t.Parallel()
		r := scheduled(t)
		joins := r.Begin()
		_, err := joins.Exec(t.Context(), `SELECT FROM outbox_delivery FOR NO KEY UPDATE`)
		relaytest.Must(t, err)
		if got := take(r); !got.InHand {
			t.Errorf("the range does not wait: %+v", got)
		}
		r.Exec(`UPDATE outbox_range SET ended_at = now()`)
		if got := join(t, r.pool); got.Rows > 0 || !got.InHand {
			t.Errorf("what is locked is not asked about again: %+v", got)
		}
		relaytest.Must(t, joins.Rollback(t.Context()))
		if got := join(t, r.pool); got.Rows != 1 {
			t.Errorf("after the lock: %+v", got)
		}
	})
}
