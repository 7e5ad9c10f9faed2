package inbox_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
)

// A handler that calls Once for its own event would learn that another has worked it, and the
// effect would be lost. For the events inside of its event Once works as ever, and the inbox knows
// them.
func TestInboxRefusesOnceForItsOwnEvent(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{MaxAttempts: 1, Handle: func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		if event.Key != "outside" {
			return receivertest.OnceThenEffect(ctx, tx, event)
		}
		event.Key = "inside"
		return receivertest.OnceThenEffect(ctx, tx, event)
	}})
	p.run()
	p.record("k")
	p.wantWorked("k", consumer.ResultFailed)
	p.wantState("k", inbox.StateFailed, 1)
	p.record("outside")
	p.wantWorked("outside", consumer.ResultProcessed)
	receivertest.WantReplayed(t, p.Post("inside", "{}"), 200, `{"state":"succeeded"}`+"\n")
	p.WantRows("inside", 1, 1)
}

// A handler that turns the wait for the disk off for itself does not turn it off for the event.
func TestInboxCommitWaitsForTheDisk(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
		return errors.Join(receivertest.EffectOf(ctx, event.Key), sent(ctx, "SET LOCAL synchronous_commit = off"))
	}})
	p.SampleCommits("effect")
	p.run()
	p.record("k")
	p.wantWorked("k", consumer.ResultProcessed)
	p.WantCommit("on")
}

// A handler that waits for a statement under its own context does not keep its event, connection and worker for ever.
func TestInboxStatementUnderAnotherContextEnds(t *testing.T) {
	t.Parallel()
	cfg := inbox.Config{Config: consumer.Config{Limits: consumer.Limits{HandlerTimeout: 50 * time.Millisecond, CommitTimeout: time.Second}}, MaxAttempts: 1}
	cfg.Handle = func(ctx context.Context, tx pgx.Tx, _ consumer.Event) error {
		_, err := tx.Exec(context.WithoutCancel(ctx), "SELECT pg_sleep(1e6)")
		return err
	}
	p := newInbox(t, cfg)
	p.run()
	p.record("k")
	p.wantWorked("k", consumer.ResultFailed)
}

// A handler that leaves the transaction to a role without rights on the inbox gets an error, and nothing of it is kept.
func TestInboxHandlerThatLeavesTheInboxOutOfReach(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{MaxAttempts: 1, Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
		if err := receivertest.EffectOf(ctx, event.Key); err != nil {
			return err
		}
		return sent(ctx, "SET LOCAL search_path = pg_catalog", "SET LOCAL ROLE pg_monitor")
	}})
	p.run()
	p.record("k")
	report := p.wantWorked("k", consumer.ResultCommitFailed)
	if !strings.Contains(report.Err.Error(), "role") {
		t.Errorf("reported %v", report.Err)
	}
	p.WantRows("k", 0, 1)
}

// No setting of a handler reaches the next event, nor the statements of the inbox itself.
func TestSecurityInboxSettingsReachNoOtherEvent(t *testing.T) {
	t.Parallel()
	const session = `SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) FROM pg_settings WHERE source = 'session'`
	p := newInbox(t, inbox.Config{})
	p.MustExec(`CREATE TABLE met (session text)`)
	p.openOn(p.configured(func(cfg *pgxpool.Config) { cfg.MaxConns = 5 }), inbox.Config{MaxAttempts: 1, Handle: func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		err := sent(ctx, "INSERT INTO met "+session, "SET statement_timeout = '7s'", "SET default_transaction_read_only = on", "SET app.tenant = '42'")
		if event.Key == "6" || err != nil {
			return errors.Join(err, receivertest.ErrHandler)
		}
		return nil
	}})
	p.run()
	for i := range 12 {
		p.record(strconv.Itoa(i))
		p.wantWorked(strconv.Itoa(i), map[bool]consumer.Result{true: consumer.ResultFailed, false: consumer.ResultProcessed}[i == 6])
	}
	if n := p.Count("SELECT count(DISTINCT session) FROM met"); n != 1 || p.Count("SELECT count(*) FROM met") != 11 {
		t.Errorf("the handlers of %d events met %d sessions", p.Count("SELECT count(*) FROM met"), n)
	}
}
