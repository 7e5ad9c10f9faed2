package settle

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// One row whose outcome the database refuses keeps no other from being written. It is tried again
// until its lease ends.
func TestRefusedOutcomeKeepsNoOther(t *testing.T) {
	t.Parallel()
	r := newRoom(t, false).begin()
	of := r.claim(300, "key")
	r.Exec(`UPDATE outbox_delivery SET attempts = 2147483647 WHERE event_id = 7`)
	r.Refuse("UPDATE ON outbox_delivery", "NEW.event_id IN (77, 177) AND NEW.claimed_by IS NULL")
	of[76].LeaseEnds, of[176] = time.Now().Add(300*time.Millisecond), with(of[176], policy.Retry)
	r.settle(of...)
	r.awaitsWritten(297)
	r.awaits("the end of a lease", func() bool { return slices.Equal(r.dropped, []int64{77}) })
	r.Exec(`DROP TRIGGER refuse ON outbox_delivery; UPDATE outbox_delivery SET attempts = 1 WHERE event_id = 7`)
	r.awaitsWritten(299)
	r.end()
	testkit.Equal(t, "unsettled", relaytest.Rows[int64](r.Database, `SELECT event_id FROM outbox_delivery WHERE status = 'pending' AND claimed_by IS NOT NULL`), []int64{77})
	if n := strings.Count(r.logged.String(), "the database refuses the outcome of deliveries"); n == 0 || n > 3 {
		t.Errorf("%d lines of the log: %s", n, r.logged.String())
	}
}

// However many settlements the database refuses, they are a hundred statements a second at most.
func TestManyRefusedAreTriedRarely(t *testing.T) {
	t.Parallel()
	w := New()
	of := func() *Settlement {
		return &Settlement{InHand: &InHand{}, rowless: true, aside: &aside{refused: errors.New("not this one")}}
	}
	for range 12_000 {
		w.aside = append(w.aside, *of())
	}
	last := of()
	least := time.Now().Add(2 * time.Minute)
	w.setAside([]Settlement{*last})
	if again := last.aside.again; again.Before(least) {
		t.Errorf("tried %v too early", least.Sub(again))
	}
}

// After Close a row that the database refuses is not waited for.
func TestCloseLeavesWhatIsRefused(t *testing.T) {
	t.Parallel()
	r := newRoom(t, false).begin()
	of := r.claim(2, "key")
	r.Refuse("UPDATE ON outbox_delivery", "NEW.event_id = 1 AND NEW.claimed_by IS NULL")
	r.settle(of...)
	r.end()
	r.wantRows("1 pending 0 claimed", "2 delivered 1 204 dated")
	if len(r.dropped) != 0 || !strings.Contains(r.logged.String(), "stopping without having settled") {
		t.Errorf("dropped %v: %s", r.dropped, r.logged.String())
	}
}

// Damaged data may be read by the next try. If not, its row is set aside like one that is refused.
func TestDamagedRowKeepsNoOther(t *testing.T) {
	t.Parallel()
	r := newRoom(t, false).begin()
	of := r.claim(3, "key")
	r.Damage("UPDATE ON outbox_delivery", "NEW.event_id = 2 AND NEW.claimed_by IS NULL")
	of[1].LeaseEnds = time.Now()
	r.settle(of...)
	r.end()
	r.wantRows("1 delivered 1 204 dated", "2 pending 0 claimed", "3 delivered 1 204 dated")
	if !slices.Equal(r.dropped, []int64{2}) || len(r.failed) < damagedTries {
		t.Errorf("dropped %v after %d failures", r.dropped, len(r.failed))
	}
}

// A person locks a row in a psql that is then forgotten. All others are written, and this one once
// the lock is gone.
func TestLockedRowKeepsNoOther(t *testing.T) {
	t.Parallel()
	for _, outcome := range []policy.Outcome{policy.Delivered, policy.Retry, policy.Fail} {
		t.Run(string(outcome), func(t *testing.T) {
			t.Parallel()
			r := newRoom(t, false).begin()
			of := r.claim(1000, "key")
			of[0] = with(of[0], outcome)
			operator := r.Begin()
			_, err := operator.Exec(t.Context(), `SELECT FROM outbox_delivery WHERE event_id = 1 FOR UPDATE`)
			relaytest.Must(t, err)
			r.settle(of...)
			r.awaitsWritten(999)
			testkit.Equal(t, "delivered, of the 999 others", relaytest.Row[int](r.Database, `SELECT count(*) FROM outbox_delivery WHERE status = 'delivered'`), 999)
			relaytest.Must(t, operator.Rollback(t.Context()))
			r.end()
			if n := relaytest.Row[int](r.Database, `SELECT count(*) FROM outbox_delivery WHERE attempts = 1 AND claimed_by IS NULL`); n != 1000 || len(r.written) != 1000 || r.stale != 0 {
				t.Errorf("%d rows, %d written, %d stale", n, len(r.written), r.stale)
			}
		})
	}
}

// What else a failed delivery writes can be locked too: others need not wait for it.
func TestLockedAlertKeepsNoOther(t *testing.T) {
	t.Parallel()
	r := newRoom(t, false).begin()
	r.Exec(`INSERT INTO outbox_alert (rule, subject, count) VALUES ('failed', 'default', 1)`)
	of := r.claim(100, "key")
	operator := r.Begin()
	_, err := operator.Exec(t.Context(), `SELECT FROM outbox_alert FOR UPDATE`)
	relaytest.Must(t, err)
	r.settle(with(of[0], policy.Fail))
	r.settle(of[1:]...)
	r.awaitsWritten(99)
	relaytest.Must(t, operator.Rollback(t.Context()))
	r.end()
	if count := relaytest.Row[int](r.Database, `SELECT count FROM outbox_alert`); count != 2 || len(r.written) != 100 {
		t.Errorf("the alert counts %d, %d are written", count, len(r.written))
	}
}

// After Close a lock is waited for, but only until the settler has to give up.
func TestLockedRowIsGivenUp(t *testing.T) {
	t.Parallel()
	r := newRoom(t, false).begin()
	of := r.claim(1, "key")
	operator := r.Begin()
	_, err := operator.Exec(t.Context(), `SELECT FROM outbox_delivery FOR UPDATE`)
	relaytest.Must(t, err)
	r.settle(of...)
	r.awaits("a second try", func() bool { return strings.Contains(r.logged.String(), "another session keeps deliveries locked") })
	r.giveUp()
	r.end()
	relaytest.Must(t, operator.Rollback(t.Context()))
	r.wantRows("1 pending 0 claimed")
	testkit.Contains(t, "found", r.logged.String(), "stopping without having settled")
}

// Another session changes a row while its settle waits for it: the settle then finds it elsewhere,
// under the same claim.
func TestChangedRowIsNotStale(t *testing.T) {
	t.Parallel()
	for _, outcome := range []policy.Outcome{policy.Delivered, policy.Retry, policy.Fail} {
		t.Run(string(outcome), func(t *testing.T) {
			t.Parallel()
			r := newRoom(t, false)
			r.settler.DB = pgtest.PoolWith(t, r.DSN, func(cfg *pgxpool.Config) {
				cfg.ConnConfig.RuntimeParams["application_name"] = "settler" // without a timeout: a slow machine would never see it wait
			})
			of := r.claim(1, "key")
			operator := r.Begin()
			_, err := operator.Exec(t.Context(), `UPDATE outbox_delivery SET last_error = 'looked at'`)
			relaytest.Must(t, err)
			r.begin().settle(with(of[0], outcome))
			relaytest.Becomes(r.Database, true, `SELECT count(*) > 0 FROM pg_stat_activity
				WHERE datname = current_database() AND application_name = 'settler' AND wait_event_type = 'Lock'`)
			relaytest.Must(t, operator.Commit(t.Context()))
			r.end()
			if !relaytest.Row[bool](r.Database, `SELECT attempts = 1 AND claimed_by IS NULL FROM outbox_delivery`) || r.stale != 0 {
				t.Errorf("%d stale, %q", r.stale, r.rows())
			}
			if n := relaytest.Row[int](r.Database, `SELECT coalesce(sum(count), 0) FROM outbox_alert`); n > 1 {
				t.Errorf("the alert counts %d", n)
			}
		})
	}
}
