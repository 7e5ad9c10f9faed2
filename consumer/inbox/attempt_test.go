package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"runtime"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Whatever a handler does, its effect and the event's state agree, the process survives, and what
// counts as an attempt is counted. A handler that ends its transaction by itself is found out
// however it ends, and its event is not tried again. One that might have, but did not, is treated
// as any other.
func TestInboxAttempts(t *testing.T) {
	t.Parallel()
	type want struct {
		result   consumer.Result
		state    inbox.State
		attempts int
		effects  int
		text     string // in last_error
		final    bool
	}
	retried := func(text string) want {
		return want{consumer.ResultFailed, inbox.StatePending, 1, 0, text, false}
	}
	ended := func(result consumer.Result, effects int) want { // another attempt would repeat what is committed
		return want{result, inbox.StateFailed, 1, effects, "committed or rolled back the transaction itself", true}
	}
	interrupted := func(result consumer.Result) want { // no attempt: the database was in the way
		return want{result, inbox.StatePending, 0, 0, "connection of the handler's transaction was lost", false}
	}
	exec := func(ctx context.Context, query string) error { return sent(ctx, query) }
	short := func(c *inbox.Config) { c.Config.Limits.HandlerTimeout = 200 * time.Millisecond }
	for name, test := range map[string]struct {
		handle func(ctx context.Context) error // after the effect is written
		change func(*inbox.Config)
		want   want
	}{
		"nil":       {func(context.Context) error { return nil }, nil, want{consumer.ResultProcessed, inbox.StateSucceeded, 1, 1, "", false}},
		"an error":  {func(context.Context) error { return receivertest.ErrHandler }, nil, retried(receivertest.ErrHandler.Error())},
		"permanent": {func(context.Context) error { return consumer.Permanent(receivertest.ErrHandler) }, nil, want{consumer.ResultFailed, inbox.StateFailed, 1, 0, receivertest.ErrHandler.Error(), true}},
		"ignore":    {func(context.Context) error { return consumer.Ignore("not ours") }, nil, want{consumer.ResultIgnored, inbox.StateIgnored, 1, 1, "not ours", false}},
		"an unknown event": {
			func(ctx context.Context) error {
				return consumer.NewRouter().Dispatch(ctx, nil, consumer.EventFrom(ctx))
			},
			nil,
			want{consumer.ResultIgnored, inbox.StateIgnored, 1, 1, "invoice.created", false},
		},
		"a credential in an error": {
			func(context.Context) error { return fmt.Errorf("dial %s", "postgres://u:s3cret@h/db\x00\n") }, nil, retried("dial postgres://***@h/db"),
		},
		"the last attempt": {
			func(context.Context) error { return receivertest.ErrHandler },
			func(c *inbox.Config) { c.MaxAttempts = 1 },
			want{consumer.ResultFailed, inbox.StateFailed, 1, 0, receivertest.ErrHandler.Error(), true},
		},
		"a panic":     {func(context.Context) error { panic("oh") }, nil, retried("the handler panicked: oh")},
		"a nil panic": {func(context.Context) error { panic(nil) }, nil, retried("the handler panicked: panic called with nil argument")},
		"an abort":    {func(context.Context) error { panic(http.ErrAbortHandler) }, nil, retried("abort")},
		"Goexit":      {func(context.Context) error { runtime.Goexit(); return nil }, nil, retried("ended its goroutine")},
		"a swallowed error": {
			func(ctx context.Context) error { _ = exec(ctx, "SELECT 1/0"); return nil }, nil,
			want{consumer.ResultCommitFailed, inbox.StatePending, 1, 0, "a statement of the handler failed", false},
		},
		"its own Rollback": {
			func(ctx context.Context) error { _ = consumer.Tx(ctx).Rollback(ctx); return nil }, nil,
			want{consumer.ResultCommitFailed, inbox.StatePending, 1, 0, "committed or rolled back", false},
		},
		"its own Commit, refused": {
			func(ctx context.Context) error { return consumer.Tx(ctx).Commit(ctx) }, nil, retried(consumer.ErrMiddlewareCommits.Error()),
		},
		"its own COMMIT": {
			func(ctx context.Context) error { return exec(ctx, commits) }, nil,
			ended(consumer.ResultCommitFailed, 1),
		},
		"its own COMMIT, and an error": {
			func(ctx context.Context) error { return errors.Join(exec(ctx, commits), receivertest.ErrHandler) }, nil,
			ended(consumer.ResultFailed, 1),
		},
		"COMMIT and BEGIN": { // its second effect must not follow
			func(ctx context.Context) error {
				return errors.Join(exec(ctx, commits), exec(ctx, "/* */ BEGIN"), exec(ctx, "INSERT INTO effect (key) VALUES ('k')"))
			}, nil,
			ended(consumer.ResultCommitFailed, 1),
		},
		"COMMIT AND CHAIN": {
			func(ctx context.Context) error { return exec(ctx, chains) }, nil,
			ended(consumer.ResultCommitFailed, 1),
		},
		"ROLLBACK AND CHAIN": {
			func(ctx context.Context) error { return exec(ctx, rollsOn) }, nil,
			ended(consumer.ResultCommitFailed, 0),
		},
		"a deferred constraint": {
			func(ctx context.Context) error { return exec(ctx, "INSERT INTO child VALUES (7)") }, nil,
			want{consumer.ResultCommitFailed, inbox.StatePending, 1, 0, "foreign key", false},
		},
		"a conflict": { // of transactions: not the handler's fault, and no attempt
			func(ctx context.Context) error {
				return exec(ctx, "DO $$ BEGIN RAISE 'in the way' USING ERRCODE = '40001'; END $$")
			}, nil,
			want{consumer.ResultFailed, inbox.StatePending, 0, 0, "in the way", false},
		},
		"a conflict called permanent": { // as behind the middleware
			func(ctx context.Context) error {
				return consumer.Permanent(exec(ctx, "DO $$ BEGIN RAISE 'in the way' USING ERRCODE = '40001'; END $$"))
			}, nil,
			want{consumer.ResultFailed, inbox.StateFailed, 1, 0, "in the way", true},
		},
		"a timeout": {
			func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
			short, retried("did not end within Config.Limits.HandlerTimeout"),
		},
		"a timeout, and success": {
			func(ctx context.Context) error { <-ctx.Done(); return nil },
			short, retried("did not end within Config.Limits.HandlerTimeout"),
		},
		"a timeout in a statement": {
			func(ctx context.Context) error { return exec(ctx, "SELECT pg_sleep(3600)") },
			short, retried("did not end within Config.Limits.HandlerTimeout"),
		},
		"a timeout that says permanent": {
			func(ctx context.Context) error { <-ctx.Done(); return consumer.Permanent(ctx.Err()) },
			short, retried("did not end within Config.Limits.HandlerTimeout"),
		},
		"a timeout beyond what PostgreSQL can hold": {
			func(context.Context) error { return nil },
			func(c *inbox.Config) { c.Config.Limits.HandlerTimeout = 365 * 24 * time.Hour },
			want{consumer.ResultProcessed, inbox.StateSucceeded, 1, 1, "", false},
		},
		"its connection lost, and success": { // it has not noticed
			func(ctx context.Context) error { return consumer.Tx(ctx).Conn().PgConn().Conn().Close() }, nil,
			interrupted(consumer.ResultCommitFailed),
		},
		"its own backend killed": {
			func(ctx context.Context) error { return exec(ctx, "SELECT pg_terminate_backend(pg_backend_pid())") }, nil,
			interrupted(consumer.ResultFailed),
		},
		"COMMIT AND CHAIN, and an error": {
			func(ctx context.Context) error { return errors.Join(sent(ctx, chains), receivertest.ErrHandler) }, nil, ended(consumer.ResultFailed, 1),
		},
		"COMMIT and BEGIN, and an error": {
			func(ctx context.Context) error {
				return errors.Join(sent(ctx, commits, "/* */ BEGIN"), receivertest.ErrHandler)
			}, nil, ended(consumer.ResultFailed, 1),
		},
		"ROLLBACK AND CHAIN, and an error": {
			func(ctx context.Context) error { return errors.Join(sent(ctx, rollsOn), receivertest.ErrHandler) }, nil, ended(consumer.ResultFailed, 0),
		},
		"COMMIT AND CHAIN, and a mistake": {
			func(ctx context.Context) error { return sent(ctx, chains, mistaken) }, nil, ended(consumer.ResultFailed, 1),
		},
		"COMMIT AND CHAIN, and a mistake swallowed": {
			func(ctx context.Context) error { _ = sent(ctx, chains, mistaken); return nil }, nil, ended(consumer.ResultCommitFailed, 1),
		},
		"COMMIT AND CHAIN, and Rollback": {
			func(ctx context.Context) error {
				err := sent(ctx, chains)
				_ = consumer.Tx(ctx).Rollback(ctx)
				return err
			}, nil, ended(consumer.ResultCommitFailed, 1),
		},
		"COMMIT, and a timeout in a statement": {
			func(ctx context.Context) error {
				return errors.Join(sent(context.WithoutCancel(ctx), commits), sent(ctx, tooLong))
			}, short, ended(consumer.ResultFailed, 1),
		},
		"COMMIT, and a timeout between statements": {
			func(ctx context.Context) error {
				err := sent(context.WithoutCancel(ctx), chains)
				<-ctx.Done()
				return err
			}, short, ended(consumer.ResultFailed, 1),
		},
		"COMMIT, and the connection lost": {
			func(ctx context.Context) error {
				return errors.Join(sent(ctx, commits), consumer.Tx(ctx).Conn().Close(ctx), receivertest.ErrHandler)
			}, nil, ended(consumer.ResultFailed, 1),
		},
		"COMMIT AND CHAIN, and the connection lost unnoticed": {
			func(ctx context.Context) error { return errors.Join(sent(ctx, chains), lose(ctx)) }, nil, ended(consumer.ResultCommitFailed, 1),
		},
		"only a Query, and an error": {
			func(ctx context.Context) error {
				return errors.Join(queried(ctx, "SELECT 'x'"), receivertest.ErrHandler)
			}, nil,
			retried(receivertest.ErrHandler.Error()),
		},
		"only a Query, and a mistake": {
			func(ctx context.Context) error { return queried(ctx, mistaken) }, nil, retried("division by zero"),
		},
		"only a Query, and a timeout": {
			func(ctx context.Context) error { return queried(ctx, tooLong) }, short, retried("HandlerTimeout"),
		},
		"only a Query, and the connection lost": {
			func(ctx context.Context) error {
				return errors.Join(queried(ctx, "SELECT 'x'"), lose(ctx), queried(ctx, "SELECT 'x'"))
			}, nil, interrupted(consumer.ResultFailed),
		},
		"only a Query whose rows stay open": {
			func(ctx context.Context) error {
				_, err := consumer.Tx(ctx).Query(ctx, "SELECT generate_series(1, 100000)")
				return errors.Join(err, receivertest.ErrHandler)
			}, nil, retried(receivertest.ErrHandler.Error()),
		},
	} {
		t.Run(name, func(t *testing.T) {
			testsize.OneIn(t, 3)
			t.Parallel()
			cfg := inbox.Config{Schedule: []time.Duration{time.Hour}}
			cfg.Handle = func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
				return errors.Join(receivertest.EffectOf(context.WithoutCancel(ctx), event.IdempotencyKey), test.handle(ctx))
			}
			if test.change != nil {
				test.change(&cfg)
			}
			p := newInbox(t, cfg)
			p.run()
			p.record("k")
			report := p.wantWorked("k", test.want.result)
			if report.Final != test.want.final || (report.Err == nil) != (test.want.text == "") {
				t.Errorf("reported %+v", report)
			}
			p.wantState("k", test.want.state, test.want.attempts)
			p.WantRows("k", test.want.effects, 1)
			p.wantLastError("k", test.want.text)
			p.record("after") // the process works on
			p.worked()
		})
	}
}

// A handler gets the event that the request has proven, and the payload byte for byte.
func TestInboxHandlersGetTheEventOfTheRequest(t *testing.T) {
	t.Parallel()
	type given struct{ event, within consumer.Event }
	full := func(h http.Header) {
		for name, value := range map[string]string{
			webhook.EventVersion: "3", webhook.EventID: "41", webhook.CreatedAt: "2026-01-02T03:04:05.678901Z", webhook.RelatedReference: "INV 7",
			webhook.OrderingKey: "a/b", webhook.Sequence: "9", webhook.Attempt: "2", webhook.DeliveryID: "41-2-7", webhook.Destination: "shop", webhook.NotAfter: "2126-01-02T03:04:05Z",
			webhook.Replay: "true", webhook.TraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", webhook.TraceState: "a=1,b=2",
			"X-Outbox-Of-A-Later-Release": "x", "Authorization": "Bearer sesame", "Cookie": "a=b",
		} {
			h.Set(name, value)
		}
	}
	for name, test := range map[string]struct {
		cfg    consumer.Config
		change func(http.Header)
		plain  bool // Standard Webhooks only
	}{
		"a relay":        {change: full},
		"a bare relay":   {change: func(http.Header) {}},
		"unsigned":       {cfg: consumer.Config{Receiver: "test", Verify: consumer.Verify{AllowUnsigned: true}}, change: full},
		"a plain sender": {cfg: consumer.Config{Verify: consumer.Verify{AcceptForeign: true}}, change: full, plain: true},
		"its own scheme": {cfg: consumer.Config{Verify: consumer.Verify{Custom: func(h http.Header, body []byte, now time.Time) (consumer.Event, error) {
			return consumer.Event{
				IdempotencyKey: "k", Type: "charge.succeeded", Version: 2, ID: 3, CreatedAt: time.Unix(1_700_000_000, 123456000).UTC(), RelatedReference: "ch_1", OrderingKey: "cus",
				Sequence: 4, Attempt: 5, DeliveryID: "d", Destination: "eu", NotAfter: time.Unix(4_000_000_000, 0).UTC(), Replay: true, TraceParent: "p", TraceState: "s",
			}, nil
		}}}, change: full},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			requested, worked := make(chan consumer.Event, 1), make(chan given, 1)
			cfg := inbox.Config{Config: test.cfg}
			cfg.Config.Observe = func(_ context.Context, r consumer.Report) {
				if r.Result == consumer.ResultRecorded {
					requested <- r.Event
				}
			}
			cfg.Handle = func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
				worked <- given{event, consumer.EventFrom(ctx)}
				return nil
			}
			if cfg.Config.Verify.Custom == nil && !cfg.Config.Verify.AllowUnsigned {
				cfg.Config.Secrets = []string{receivertest.SecretText}
			}
			p := newInbox(t, cfg)
			p.run()
			body := "{ \"a\" : 1e3 }\n\x00\xff"
			r := p.NewRequest("k", body, test.change)
			if test.plain {
				receivertest.SignPlain(t, r, "msg_1", body) // which covers none of the other headers
			}
			if got := p.Do(r); got.Status != http.StatusAccepted {
				t.Fatalf("got %d %s", got.Status, got.Body)
			}
			want, got := <-requested, <-worked
			if want.Payload != nil {
				t.Errorf("a payload is reported: %q", want.Payload)
			}
			want.Payload = []byte(body)
			if !reflect.DeepEqual(got.event, want) || !reflect.DeepEqual(got.within, want) {
				t.Errorf("the handler got\n%+v and in the context\n%+v, the request had\n%+v", got.event, got.within, want)
			}
			if want.Source == "" || want.IdempotencyKey == "" {
				t.Errorf("%+v", want)
			}
			testkit.Equal(t, "a credential is stored", p.Count("SELECT count(*) FROM inbox_events WHERE request_headers::text ~* 'sesame|cookie'"), 0)
		})
	}
}

// The handler's transaction has the level that Config names; recording never has.
func TestInboxWorksAtTheIsolationLevelOfItsConfig(t *testing.T) {
	t.Parallel()
	for level, want := range map[sql.IsolationLevel]string{
		sql.LevelDefault: "repeatable read", sql.LevelReadCommitted: "read committed", sql.LevelSerializable: "serializable",
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			levels := make(chan string, 1)
			cfg := inbox.Config{Config: consumer.Config{Isolation: level}}
			cfg.Handle = func(ctx context.Context, _ pgx.Tx, _ consumer.Event) error {
				var got string
				err := consumer.Tx(ctx).QueryRow(ctx, "SHOW transaction_isolation").Scan(&got)
				levels <- got
				return err
			}
			p := newInbox(t, inbox.Config{})
			p.MustExec(repeatableRead)
			p = p.again(cfg)
			p.run()
			p.record("k")
			testkit.Equal(t, "the handler works at", <-levels, want)
			p.wantWorked("k", consumer.ResultProcessed)
		})
	}
}

// After its time is up a handler's transaction ends on the server, too, even if its process is
// gone.
func TestInboxBoundsTheSessionOfAWorkerThatVanishes(t *testing.T) {
	t.Parallel()
	settings := make(chan [2]string, 2)
	cfg := inbox.Config{Config: consumer.Config{Limits: consumer.Limits{HandlerTimeout: 90 * time.Second, CommitTimeout: 10 * time.Second}}}
	cfg.Handle = func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
		var got string
		err := consumer.Tx(ctx).QueryRow(ctx, "SHOW idle_in_transaction_session_timeout").Scan(&got)
		settings <- [2]string{event.IdempotencyKey, got}
		return err
	}
	p := newInbox(t, cfg)
	p.run()
	p.record("unset")
	testkit.Equal(t, "settings", <-settings, [2]string{"unset", "100s"})
	p.wantWorked("unset", consumer.ResultProcessed)
	if err := p.stop(); err != nil {
		t.Error(err)
	}
	p.DSN = receivertest.WithSetting(p.DSN, "idle_in_transaction_session_timeout", "45s")
	strict := p.again(cfg)
	strict.run()
	strict.record("set")
	testkit.Equal(t, "settings", <-settings, [2]string{"set", "45s"})
}

// An event whose row was spoiled by hand is failed, and does not keep workers from the others.
func TestInboxFailsWhatCannotBeRead(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	for i, headers := range []string{`"text"`, `{"X-Outbox-Sequence": ["x"]}`, `{"X-Outbox-Sequence": "1"}`} {
		key := fmt.Sprint(i)
		p.record(key)
		p.MustExec("UPDATE inbox_events SET request_headers = $2::text::jsonb WHERE idempotency_key = $1", key, headers)
	}
	p.record("whole")
	p.run()
	p.Await("SELECT count(*) = 3 FROM inbox_events WHERE processing_state = 'failed' AND last_error LIKE 'read recorded headers: %'")
	p.awaitState("whole", inbox.StateSucceeded)
}

// What a handler has written is seen when its event is seen to have succeeded, and not before.
func TestInboxCommitsStateAndEffectTogether(t *testing.T) {
	t.Parallel()
	entered, leave := make(chan struct{}), make(chan struct{})
	p := newInbox(t, inbox.Config{Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
		err := receivertest.EffectOf(ctx, event.IdempotencyKey)
		close(entered)
		<-leave
		return err
	}})
	p.run()
	p.record("k")
	<-entered
	p.wantState("k", inbox.StateProcessing, 0)
	p.WantRows("k", 0, 1)
	// A duplicate does not wait for the handler.
	receivertest.WantReplayed(t, p.Post("k", `{"key":"k"}`), 200, `{"state":"processing"}`+"\n")
	close(leave)
	p.wantWorked("k", consumer.ResultProcessed)
	p.WantRows("k", 1, 1)
}

// Statements that end a handler's transaction in a way that is not refused.
const (
	commits  = "/* */ COMMIT"
	chains   = "/* */ COMMIT AND CHAIN"
	rollsOn  = "/* */ ROLLBACK AND CHAIN"
	tooLong  = "SELECT pg_sleep(3600)"
	mistaken = "SELECT 1/0"
)

// sent runs statements in a handler's transaction, and returns the first error.
func sent(ctx context.Context, queries ...string) error {
	for _, query := range queries {
		if _, err := consumer.Tx(ctx).Exec(ctx, query); err != nil {
			return err
		}
	}
	return nil
}

// lose breaks the connection of a handler's transaction. That is noticed when it is used again.
func lose(ctx context.Context) error { return consumer.Tx(ctx).Conn().PgConn().Conn().Close() }

// queried leaves a transaction in doubt that has not changed.
func queried(ctx context.Context, query string) error {
	rows, err := consumer.Tx(ctx).Query(ctx, query)
	if err != nil {
		return err
	}
	_, err = pgx.CollectRows(rows, pgx.RowTo[string])
	return err
}

// An event whose handler has committed it is not given back when the inbox stops.
func TestInboxGivesNothingBackThatIsCommitted(t *testing.T) {
	t.Parallel()
	for name, wait := range map[string]func(ctx context.Context) error{
		"between statements": func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
		"in a statement":     func(ctx context.Context) error { return sent(ctx, tooLong) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			committed := make(chan struct{})
			p := newInbox(t, inbox.Config{DrainTimeout: 10 * time.Millisecond, Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
				err := errors.Join(receivertest.EffectOf(ctx, event.IdempotencyKey), sent(ctx, chains))
				close(committed)
				return errors.Join(err, wait(ctx))
			}})
			p.run()
			p.record("k")
			<-committed
			pgtest.Must(t, p.stop())
			p.wantState("k", inbox.StateFailed, 1)
			p.WantRows("k", 1, 1)
		})
	}
}
