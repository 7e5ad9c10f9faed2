package control

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/relay"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

// Many who look at once cost one status.
func TestStatusIsShared(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	c := newControl(db)
	now := time.Now()
	c.now = func() time.Time { return now }
	first, err := c.Status(t.Context())
	relaytest.Must(t, err)
	db.Insert(1, "k")
	if again, err := c.Status(t.Context()); err != nil || !again.At.Equal(first.At) {
		t.Errorf("it was read again: %v", err)
	}
	now = now.Add(statusAge)
	if later, err := c.Status(t.Context()); err != nil || later.Destinations[0].Pending != 1 {
		t.Errorf("%+v, %v", later, err)
	}
}

// A token confirms one order, for a while. What runs when the process stops is interrupted and says
// so.
func TestOrders(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3000, "k")
	db.Settled("failed", "true")
	// Each batch waits until the test lets it go.
	gate := db.Hold("UPDATE OF done ON outbox_audit", "true")
	c := newControl(db)
	now := time.Now()
	c.now = func() time.Time { return now }
	actor := ops.Actor{Name: "ann", Origin: ops.OriginAPI}
	preview, err := c.Preview(t.Context(), ops.Order{Action: "replay", Selection: ops.Selection{Destination: "default"}})
	relaytest.Must(t, err)
	if _, err := c.Start(t.Context(), actor, preview.Order, preview.Token); !errors.Is(err, ErrBusy) {
		t.Errorf("before Run: %v", err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx) })
	var id int64
	relaytest.Eventually(t, "the start", func() bool {
		id, err = c.Start(t.Context(), actor, preview.Order, preview.Token)
		return !errors.Is(err, ErrBusy)
	})
	relaytest.Must(t, err)
	if _, err := c.Start(t.Context(), actor, preview.Order, preview.Token); !errors.Is(err, ErrNotConfirmed) {
		t.Errorf("a token that was used: %v", err)
	}
	now = now.Add(confirmWithin)
	if _, err := c.Start(t.Context(), actor, preview.Order, preview.Token); !errors.Is(err, ErrNotConfirmed) {
		t.Errorf("an old token: %v", err)
	}
	if !c.Runs(id) || !errors.Is(c.Interrupt(t.Context(), actor, id+1), ErrNotRunning) {
		t.Error("it does not know what it works on")
	}
	stop()
	relaytest.Must(t, gate.Rollback(t.Context()))
	running.Wait()
	testkit.Equal(t, "found", relaytest.Row[string](db, `SELECT state || ' ' || (done < 3000) FROM outbox_audit`), "interrupted true")
	if c.Runs(id) {
		t.Error("it still runs")
	}
}

// A status says what this process's relay sees of the database, which stores nothing of it.
func TestStatusSaysWhatTheRelaySees(t *testing.T) {
	t.Parallel()
	c := newControl(relaytest.Covered(t))
	state := relay.State{Trouble: &alert.Alert{Rule: alert.RuleDatabase, Subject: "r1", FirstError: "no space left on device"}}
	c.Follow(func() relay.State { return state })
	o, err := c.Overview(t.Context(), List{})
	relaytest.Must(t, err)
	if len(o.Advice) == 0 || o.Advice[0].Text != `Relay "r1" has trouble with its database: no space left on device.` || o.Advice[0].Level != ops.Critical {
		t.Errorf("%+v", o.Advice)
	}
	state.Trouble = nil
	c.Forget()
	if o, err = c.Overview(t.Context(), List{}); err != nil || slices.ContainsFunc(o.Advice, func(a ops.Advice) bool { return a.Rule == alert.RuleDatabase }) {
		t.Errorf("%v %+v", err, o.Advice)
	}
}

// A database that refuses the connection is away, whatever its reason, and no defect of the relay.
func TestRefusedConnectionIsADatabaseThatIsAway(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	pool := pgtest.PoolWith(t, db.DSN, func(cfg *pgxpool.Config) { cfg.ConnConfig.Database = "no_such_database" })
	_, err := New(Config{Outbox: ops.New(pool), History: history.New()}).Status(t.Context())
	if p, unexpected := ProblemOf(err); p.Status != 503 || p.Kind != "database" || !unexpected {
		t.Errorf("%+v of %v", p, err)
	}
}
