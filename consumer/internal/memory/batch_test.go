package memory_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// begin returns a memory whose events are those of one batch.
func (m *ownMemory) begin() (*ownMemory, memory.Batch) {
	m.T.Helper()
	batch := m.memory.(memory.Batcher).Batch()
	m.T.Cleanup(batch.Rollback)
	return &ownMemory{Env: m.Env, memory: batch}, batch
}

// remembered returns the keys of effects and of remembered events.
func (m *ownMemory) remembered() string {
	m.T.Helper()
	var keys string
	pgtest.Must(m.T, m.Pool.QueryRow(m.T.Context(), `SELECT coalesce((SELECT string_agg(key, ' ' ORDER BY key) FROM effect), '') || '|' ||
		coalesce((SELECT string_agg(idempotency_key, ' ' ORDER BY idempotency_key) FROM processed_events), '')`).Scan(&keys))
	return keys
}

// Each event of a batch is a savepoint: what fails is rolled back alone, a duplicate is known, and
// nothing is there before the commit.
func TestBatch(t *testing.T) {
	t.Parallel()
	m := newMemory(t, nil)
	in, batch := m.begin()
	worked := func(key string, status int, want error, fails error) {
		t.Helper()
		in.wantWorked(key, status, want, func(ctx context.Context, tx pgx.Tx) error {
			if err := effect(ctx, tx, key); err != nil {
				return err
			}
			return fails
		})
	}
	worked("a", 204, nil, nil)
	worked("b", 204, errRefused, errRefused)
	worked("c", 201, nil, nil)
	testkit.ErrorContains(t, "a duplicate", in.work("a", 204, func(context.Context, pgx.Tx) error { return errors.New("it ran twice") }), "is not admitted")
	worked("b", 204, nil, nil)
	if got := m.remembered(); got != "|" {
		t.Errorf("before the commit: %s", got)
	}
	pgtest.Must(t, batch.Commit(t.Context()))
	if got := m.remembered(); got != "a b c|a b c" {
		t.Errorf("after it: %s", got)
	}
	if err := m.work("c", 204, func(context.Context, pgx.Tx) error { return nil }); err == nil {
		t.Error("an event of the batch is admitted again")
	}
}

// A handler that aborts its savepoint, leaves rows open, or ends the transaction keeps nothing of
// itself from being rolled back, and a batch whose transaction has ended commits nothing.
func TestBatchIsBroken(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		handle func(ctx context.Context, tx pgx.Tx) error
		want   string
	}{
		"an aborted savepoint": {func(ctx context.Context, tx pgx.Tx) error { _, _ = tx.Exec(ctx, "SELECT 1/0"); return nil }, "first last|first last"},
		"a lost connection": {func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, "SELECT pg_terminate_backend(pg_backend_pid())")
			return nil
		}, "|"},
		"rows left open": {func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Query(ctx, "SELECT generate_series(1, 100000)")
			return err
		}, "|"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMemory(t, nil)
			in, batch := m.begin()
			ordinary := func(key string) error {
				return in.work(key, 204, func(ctx context.Context, tx pgx.Tx) error { return effect(ctx, tx, key) })
			}
			pgtest.Must(t, ordinary("first"))
			if err := in.work("broken", 204, c.handle); err == nil && name != "a lost connection" { // which the next statement meets
				t.Error("what the handler broke is remembered")
			}
			broken := c.want == "|"
			if err := ordinary("last"); (err != nil) != broken {
				t.Errorf("the event behind it: %v", err)
			}
			if err := batch.Commit(t.Context()); (err != nil) != broken {
				t.Errorf("commit: %v", err)
			}
			batch.Rollback()
			testkit.Equal(t, "remembered", m.remembered(), c.want)
		})
	}
}
