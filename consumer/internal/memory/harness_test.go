package memory_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestMain(m *testing.M) {
	receivertest.RunTests(m, map[string]func(p *receivertest.Player){"prune-die": pruneAndDie})
}

// ownMemory is a memory in its own database, with one connection and no receiver around it.
type ownMemory struct {
	*receivertest.Env
	memory memory.Memory
}

// newMemory returns one. configure changes what its pool does; nil: nothing.
func newMemory(t *testing.T, configure func(*pgxpool.Config)) *ownMemory {
	t.Helper()
	dsn := pgtest.New(t, migrations.Inbox)
	pool := pgtest.PoolWith(t, dsn, func(cfg *pgxpool.Config) {
		cfg.MaxConns = 1
		if configure != nil {
			configure(cfg)
		}
	})
	s := memory.Settings{Receiver: "test", Source: "outbox", Tolerance: time.Minute, HandlerTimeout: receivertest.Patience, CommitTimeout: receivertest.Patience}
	m := &ownMemory{
		Env:    &receivertest.Env{T: t, DSN: dsn, Pool: pgtest.Pool(t, dsn)},
		memory: memory.InDatabase(s, &memory.PgxDatabase{Pool: pool, Timeout: s.CommitTimeout}),
	}
	m.MustExec(receivertest.Schema)
	return m
}

// errRefused is that of a handler which refuses its event.
var errRefused = errors.New("refused")

// work has handle work an event, and the memory remember it, as a receiver does.
func (m *ownMemory) work(key string, status int, handle func(ctx context.Context, tx pgx.Tx) error) error {
	rq := &memory.Request{Began: time.Now(), Event: headers.Event{Receiver: "test", Source: "outbox", IdempotencyKey: key, Type: "t", Version: 1}}
	found, err := m.memory.Admit(m.T.Context(), rq)
	if err != nil {
		return err
	}
	if found.Admission != memory.Admitted {
		return fmt.Errorf("%s is not admitted: %d", key, found.Admission)
	}
	ctx, cancel := found.Held.Lend(m.T.Context(), rq.Event)
	defer cancel()
	if err := handle(ctx, handlerctx.From(ctx).Tx); err != nil {
		found.Held.Rollback()
		return err
	}
	return found.Held.Remember(ctx, status, "")
}

// wantWorked asserts what working an event fails with.
func (m *ownMemory) wantWorked(key string, status int, want error, handle func(ctx context.Context, tx pgx.Tx) error) {
	m.T.Helper()
	if err := m.work(key, status, handle); !errors.Is(err, want) {
		m.T.Errorf("%s: %v, want %v", key, err, want)
	}
}

// effect is what a handler does for its event.
func effect(ctx context.Context, tx pgx.Tx, key string) error {
	return execute(ctx, tx, "INSERT INTO effect VALUES ($1)", key)
}
