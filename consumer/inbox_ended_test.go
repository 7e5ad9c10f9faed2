package consumer_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

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

// A handler that ends its transaction by itself is found out however it ends, and its event is not tried again; one that
// might have, but did not, is treated as any other.
func TestInboxFindsOutWhoEndedTheTransaction(t *testing.T) {
	t.Parallel()
	const ended = "committed or rolled back the transaction itself"
	short := func(c *inbox.Config) { c.HandlerTimeout = 200 * time.Millisecond }
	type want struct {
		state    inbox.State
		attempts int
		effects  int
		text     string
	}
	failed := func(effects int) want { return want{inbox.StateFailed, 1, effects, ended} }
	for name, test := range map[string]struct {
		handle func(ctx context.Context) error // after the effect is written
		change func(*inbox.Config)
		want   want
	}{
		"COMMIT AND CHAIN, and an error": {
			func(ctx context.Context) error { return errors.Join(sent(ctx, chains), errHandler) }, nil, failed(1),
		},
		"COMMIT AND CHAIN over the connection": {
			func(ctx context.Context) error {
				_, err := consumer.Tx(ctx).Conn().Exec(ctx, chains)
				return errors.Join(err, errHandler)
			}, nil, failed(1),
		},
		"COMMIT AND CHAIN in a batch": {
			func(ctx context.Context) error {
				batch := &pgx.Batch{}
				batch.Queue(chains)
				return errors.Join(consumer.Tx(ctx).SendBatch(ctx, batch).Close(), errHandler)
			}, nil, failed(1),
		},
		"COMMIT and BEGIN, and an error": {
			func(ctx context.Context) error { return errors.Join(sent(ctx, commits, "/* */ BEGIN"), errHandler) }, nil, failed(1),
		},
		"ROLLBACK AND CHAIN, and an error": {
			func(ctx context.Context) error { return errors.Join(sent(ctx, rollsOn), errHandler) }, nil, failed(0),
		},
		"COMMIT AND CHAIN, and a mistake": {
			func(ctx context.Context) error { return sent(ctx, chains, mistaken) }, nil, failed(1),
		},
		"COMMIT AND CHAIN, and a mistake swallowed": {
			func(ctx context.Context) error { _ = sent(ctx, chains, mistaken); return nil }, nil, failed(1),
		},
		"COMMIT AND CHAIN, and Rollback": {
			func(ctx context.Context) error {
				err := sent(ctx, chains)
				_ = consumer.Tx(ctx).Rollback(ctx)
				return err
			}, nil, failed(1),
		},
		"COMMIT, and a timeout in a statement": {
			func(ctx context.Context) error {
				return errors.Join(sent(context.WithoutCancel(ctx), commits), sent(ctx, tooLong))
			}, short, failed(1),
		},
		"COMMIT, and a timeout between statements": {
			func(ctx context.Context) error {
				err := sent(context.WithoutCancel(ctx), chains)
				<-ctx.Done()
				return err
			}, short, failed(1),
		},
		"COMMIT, and the connection lost": {
			func(ctx context.Context) error {
				return errors.Join(sent(ctx, commits), consumer.Tx(ctx).Conn().Close(ctx), errHandler)
			}, nil, failed(1),
		},
		"COMMIT AND CHAIN, and the connection lost unnoticed": {
			func(ctx context.Context) error { return errors.Join(sent(ctx, chains), lose(ctx)) }, nil, failed(1),
		},
		"only a Query, and an error": {
			func(ctx context.Context) error { return errors.Join(queried(ctx, "SELECT 'x'"), errHandler) }, nil,
			want{inbox.StatePending, 1, 0, errHandler.Error()},
		},
		"only a Query, and a mistake": {
			func(ctx context.Context) error { return queried(ctx, mistaken) }, nil, want{inbox.StatePending, 1, 0, "division by zero"},
		},
		"only a Query, and a timeout": {
			func(ctx context.Context) error { return queried(ctx, tooLong) }, short, want{inbox.StatePending, 1, 0, "HandlerTimeout"},
		},
		"only a Query, and the connection lost": {
			func(ctx context.Context) error {
				return errors.Join(queried(ctx, "SELECT 'x'"), lose(ctx), queried(ctx, "SELECT 'x'"))
			}, nil, want{inbox.StatePending, 0, 0, "connection of the handler's transaction was lost"},
		},
		"only a Query whose rows stay open": {
			func(ctx context.Context) error {
				_, err := consumer.Tx(ctx).Query(ctx, "SELECT generate_series(1, 100000)")
				return errors.Join(err, errHandler)
			}, nil, want{inbox.StatePending, 1, 0, errHandler.Error()},
		},
	} {
		t.Run(name, func(t *testing.T) {
			testsize.OneIn(t, 3)
			t.Parallel()
			cfg := inbox.Config{Schedule: []time.Duration{time.Hour}}
			cfg.Handle = func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
				return errors.Join(effectOf(context.WithoutCancel(ctx), event.Key), test.handle(ctx))
			}
			if test.change != nil {
				test.change(&cfg)
			}
			p := newInbox(t, cfg)
			p.run()
			p.record("k")
			if report := p.worked(); report.Final != (test.want.state == inbox.StateFailed) || report.Err == nil {
				t.Errorf("reported %+v", report)
			}
			p.wantState("k", test.want.state, test.want.attempts)
			p.wantRows("k", test.want.effects, 1)
			p.wantLastError("k", test.want.text)
		})
	}
}

// Nor is an event given back, when the inbox stops, whose handler has committed it.
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
				err := errors.Join(effectOf(ctx, event.Key), sent(ctx, chains))
				close(committed)
				return errors.Join(err, wait(ctx))
			}})
			p.run()
			p.record("k")
			<-committed
			if err := p.stop(); err != nil {
				t.Fatal(err)
			}
			p.wantState("k", inbox.StateFailed, 1)
			p.wantRows("k", 1, 1)
		})
	}
}
