package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A handler that calls Once for its own event would learn that another has worked it, and the
// effect would be lost. For the events inside of its event Once works as ever, and the inbox knows
// them.
func TestInboxRefusesOnceForItsOwnEvent(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{MaxAttempts: 1, Handle: func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		if event.IdempotencyKey != "outside" {
			return receivertest.OnceThenEffect(ctx, tx, event)
		}
		event.IdempotencyKey = "inside"
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
		return errors.Join(receivertest.EffectOf(ctx, event.IdempotencyKey), sent(ctx, "SET LOCAL synchronous_commit = off"))
	}})
	p.SampleCommits("effect")
	p.run()
	p.record("k")
	p.wantWorked("k", consumer.ResultProcessed)
	p.WantCommit("on")
}

// A handler that waits for a statement under its own context does not keep its event, connection
// and worker for ever.
func TestInboxStatementUnderAnotherContextEnds(t *testing.T) {
	t.Parallel()
	cfg := inbox.Config{Config: consumer.Config{Limits: consumer.Limits{HandlerTimeout: 50 * time.Millisecond, CommitTimeout: 5 * time.Second}}, MaxAttempts: 1}
	cfg.Handle = func(ctx context.Context, tx pgx.Tx, _ consumer.Event) error {
		_, err := tx.Exec(context.WithoutCancel(ctx), "SELECT pg_sleep(1e6)")
		return err
	}
	p := newInbox(t, cfg)
	p.run()
	p.record("k")
	p.wantWorked("k", consumer.ResultFailed)
}

// A handler that leaves the transaction to a role without rights on the inbox gets an error, and
// nothing of it is kept.
func TestInboxHandlerThatLeavesTheInboxOutOfReach(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{MaxAttempts: 1, Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
		if err := receivertest.EffectOf(ctx, event.IdempotencyKey); err != nil {
			return err
		}
		return sent(ctx, "SET LOCAL search_path = pg_catalog", "SET LOCAL ROLE pg_monitor")
	}})
	p.run()
	p.record("k")
	report := p.wantWorked("k", consumer.ResultCommitFailed)
	testkit.Contains(t, "reported", report.Err.Error(), "role")
	p.WantRows("k", 0, 1)
}

// No setting of a handler reaches the next event, nor the statements of the inbox itself, which do
// not use tables of the same names in a tenant's schema.
func TestSecurityInboxSettingsReachNoOtherEvent(t *testing.T) {
	t.Parallel()
	const session = `SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) FROM pg_settings WHERE source = 'session'`
	p := newInbox(t, inbox.Config{})
	p.MustExec(`CREATE TABLE met (session text); CREATE SCHEMA tenant; CREATE TABLE tenant.processed_events (LIKE processed_events INCLUDING ALL);
		CREATE TABLE tenant.inbox_events (LIKE inbox_events INCLUDING ALL)`)
	p.openOn(p.configured(func(cfg *pgxpool.Config) { cfg.MaxConns = 5 }), inbox.Config{MaxAttempts: 1, Handle: func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		err := sent(ctx, "INSERT INTO met "+session, "SET statement_timeout = '7s'", "SET default_transaction_read_only = on", "SET app.tenant = '42'",
			"SELECT set_config('search_path', 'tenant, public', false)")
		if event.IdempotencyKey == "6" || err != nil {
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
	testkit.Equal(t, "rows in the tenant's tables", p.Count("SELECT (SELECT count(*) FROM tenant.processed_events) + (SELECT count(*) FROM tenant.inbox_events)"), 0)
}

// A handler may read and change its event's row, such as to remove what is personal in it.
func TestInboxHandlersMayChangeTheirOwnRow(t *testing.T) {
	t.Parallel()
	for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run(level.String(), func(t *testing.T) {
			t.Parallel()
			p := newInbox(t, inbox.Config{Config: consumer.Config{Isolation: level}, Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
				var state string
				read := consumer.Tx(ctx).QueryRow(ctx, "SELECT processing_state FROM inbox_events WHERE idempotency_key = $1", event.IdempotencyKey).Scan(&state)
				_, err := consumer.Tx(ctx).Exec(ctx, "UPDATE inbox_events SET payload = NULL WHERE related_reference = $1", event.RelatedReference)
				return errors.Join(receivertest.EffectOf(ctx, event.IdempotencyKey), read, err)
			}})
			p.run()
			personal := receivertest.With(webhook.RelatedReference, "customer 42")
			p.record("1", ordered("o", 1), personal)
			p.wantWorked("1", consumer.ResultProcessed)
			p.record("2", ordered("o", 2), personal)
			p.wantWorked("2", consumer.ResultProcessed)
			for _, key := range []string{"1", "2"} {
				p.wantState(key, inbox.StateSucceeded, 1)
				p.WantRows(key, 1, 1)
			}
			testkit.Equal(t, "payloads removed", p.Count("SELECT count(*) FROM inbox_events WHERE payload IS NULL"), 2)
		})
	}
}

// What has no payload any more is not worked: neither by a replay, nor when it is made pending by
// hand.
func TestInboxDoesNotWorkRemovedPayloads(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	for _, key := range []string{"1", "2", "3", "4"} {
		p.record(key)
	}
	for _, state := range []inbox.State{inbox.StateFailed, inbox.StateSucceeded} {
		p.MustExec("UPDATE inbox_events SET processing_state = $1, next_attempt_at = NULL, payload = CASE idempotency_key WHEN '3' THEN payload END", string(state))
		for _, test := range []struct {
			filter inboxops.Selection
			want   int64
		}{
			{inboxops.Selection{Key: "1"}, 0},
			{inboxops.Selection{Type: "*", Limit: 1}, 1}, // the third: removed ones do not count
			{inboxops.Selection{FromID: 1}, 0},
		} {
			test.filter.States = []string{string(state)}
			if n, err := p.replay(test.filter); n != test.want || err != nil {
				t.Errorf("replayed %d, %v of %+v, want %d", n, err, test.filter, test.want)
			}
		}
		p.wantState("3", inbox.StatePending, 0)
	}
	if n, err := p.ignore(inboxops.Selection{Key: "3"}); n != 1 || err != nil {
		t.Errorf("ignored %d, %v", n, err)
	}
	p.MustExec("UPDATE inbox_events SET processing_state = 'failed'")
	if n, err := p.ignore(inboxops.Selection{Type: "*"}); n != 4 || err != nil {
		t.Errorf("ignored %d, %v, want those without a payload, too", n, err)
	}

	p.MustExec("UPDATE inbox_events SET processing_state = 'pending', next_attempt_at = now() WHERE idempotency_key = '1'")
	p.run()
	if report := p.wantWorked("1", consumer.ResultFailed); !report.Final || report.HandlerDuration != 0 {
		t.Errorf("reported %+v", report)
	}
	p.wantState("1", inbox.StateFailed, 1)
	p.wantLastError("1", "payload was removed")
	p.WantRows("1", 0, 1)
}

// A payload of no bytes is one.
func TestInboxWorksEmptyPayloads(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	p.run()
	if got := p.Post("k", ""); got.Status != http.StatusAccepted {
		t.Fatalf("got %d %s", got.Status, got.Body)
	}
	p.wantWorked("k", consumer.ResultProcessed)
}

// An error that panics when it is looked at counts as a panic of the handler, and ends no process.
func TestInboxSurvivesErrorsThatPanic(t *testing.T) {
	t.Parallel()
	for name, bad := range receivertest.ErrorsThatPanic() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newInbox(t, inbox.Config{
				Config:   consumer.Config{Breaker: receivertest.Must(breaker.New(breaker.Config{}))},
				Schedule: []time.Duration{time.Hour},
				Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
					_ = receivertest.EffectOf(ctx, event.IdempotencyKey)
					return bad
				},
			})
			p.run()
			p.record("k")
			if report := p.wantWorked("k", consumer.ResultFailed); report.Final {
				t.Errorf("reported %+v", report)
			}
			p.wantState("k", inbox.StatePending, 1)
			p.WantRows("k", 0, 1)
			p.wantLastError("k", "the handler panicked")
			testkit.Contains(t, "logged", p.Logged.String(), "stack=")
			p.record("after") // the process works on
			p.wantWorked("after", consumer.ResultFailed)
		})
	}
}

// An Observe that panics changes no outcome, and ends no process.
func TestInboxSurvivesAnObserveThatPanics(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{Config: consumer.Config{Observe: func(_ context.Context, r consumer.Report) {
		if r.Inbox {
			panic("the observer of " + r.Event.IdempotencyKey + ", password=hunter2")
		}
	}}})
	p.run()
	for _, key := range []string{"1", "2"} {
		p.record(key)
		p.awaitState(key, inbox.StateSucceeded)
	}
	pgtest.Must(t, p.stop())
	for _, key := range []string{"1", "2"} {
		p.wantState(key, inbox.StateSucceeded, 1)
		p.WantRows(key, 1, 1)
	}
	logged := p.Logged.String()
	for _, text := range []string{"level=ERROR", "Config.Observe panicked", "the observer of 1", "the observer of 2", "stack="} {
		if !strings.Contains(logged, text) {
			t.Errorf("%q is not in the log:\n%s", text, logged)
		}
	}
	if strings.Contains(logged, "hunter2") {
		t.Errorf("logged %s", logged)
	}
}
