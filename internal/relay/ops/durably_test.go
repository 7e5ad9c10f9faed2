package ops

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// The host of an operator that is suspended, or cut off, keeps no locks: the server ends what
// stands still. No statement waits long for a lock, nor reads a table for what an index has.
func TestChangesOfOperatorsAreBounded(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	relaytest.Must(t, New(db.Pool).durably(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		for setting, want := range map[string]string{
			"idle_in_transaction_session_timeout": "10s", "lock_timeout": "2s", "statement_timeout": "30s", "synchronous_commit": "on", "enable_seqscan": "off",
		} {
			var got string
			relaytest.Must(t, tx.QueryRow(ctx, `SELECT current_setting($1)`, setting).Scan(&got))
			testkit.Equal(t, setting, got, want)
		}
		return nil
	}))
}

// A batch that waits for its standby holds up no producer that does not: a transaction that
// notifies commits alone, in the whole cluster, until its standby has answered.
func TestNoProducerWaitsForTheStandbyOfABatch(t *testing.T) {
	t.Parallel()
	_, db := relaytest.Serve(t, localpg.Options{})
	db.Route("default")
	db.Cover()
	db.Insert(1500, "k")
	standby := func(set string) {
		db.Exec(`ALTER SYSTEM ` + set)
		db.Exec(`SELECT pg_reload_conf()`)
	}
	ended, waits := make(chan error), false
	go func() {
		_, err := New(db.Pool).Discard(t.Context(), Selection{Destination: "default"}, func(Bulk) {
			if !waits {
				standby(`SET synchronous_standby_names = 'away'`)
				relaytest.Becomes(db, "away", `SELECT current_setting('synchronous_standby_names')`)
			}
			waits = true
		})
		ended <- err
	}()
	relaytest.Becomes(db, true, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep')`)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	_, err := db.Pool.Exec(ctx, `SELECT set_config('synchronous_commit', 'local', true), pg_notify('outbox_wake', '')`)
	cancel()
	standby(`RESET synchronous_standby_names`)
	relaytest.Must(t, <-ended)
	if err != nil {
		t.Errorf("a notification waits: %v", err)
	}
}

// Whatever follows the last batch, the operation is done.
func TestEndOfAnOperationDoesNotFailIt(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "k")
	db.Settled("failed", "true")
	db.Exec(`INSERT INTO outbox_alert (rule, subject) VALUES ('failed', 'default')`)
	db.Refuse("UPDATE ON outbox_alert", "true")
	_, err := New(db.Pool).Replay(t.Context(), Selection{Destination: "default"}, 0, nil)
	testkit.ErrorContains(t, "the returned error", err, "not this one")
	testkit.Equal(t, "the audit", relaytest.Row[string](db, `SELECT state || ' ' || done FROM outbox_audit`), "done 1")
}

// A counter counts the batches of statements, and those outside of one, that a pool executes.
type counter struct{ n atomic.Int64 }

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n.Add(1)
	return ctx
}

func (c *counter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	c.n.Add(1)
	return ctx
}

func (*counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData)     {}
func (*counter) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*counter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// What a replay does not find costs few statements, however slow it is: the rate is that of what it
// makes due.
func TestReplayLooksInLargeSteps(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(5000, "k")
	db.Settled("delivered", "true")
	count := new(counter)
	pool := pgtest.PoolWith(t, db.DSN, func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = count })
	order := Order{Action: "replay", Selection: Selection{Statuses: []string{"delivered"}, Rate: new(int64(20))}}
	_, b, err := New(pool).Preview(t.Context(), order)
	if err != nil || b.Matched != 5000 || count.n.Swap(0) > 20 {
		t.Errorf("%+v, %v", b, err)
	}
	order.Selection.Type = "none"
	b, err = New(pool).Do(t.Context(), order, nil)
	if n := count.n.Load(); err != nil || b.Matched != 0 || n > 30 {
		t.Errorf("%d statements for %+v, %v", n, b, err)
	}
}
