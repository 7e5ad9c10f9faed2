package inbox

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// The package inboxops repeats the lock of an ordering key and the notification of workers. Both must be those of this package.
func TestInboxOperatorsUseTheSameLockAndNotification(t *testing.T) {
	t.Parallel()
	dsn := pgtest.New(t, migrations.Inbox)
	pool := pgtest.Pool(t, dsn)
	conn, err := pgx.Connect(t.Context(), dsn)
	pgtest.Must(t, err)
	defer conn.Close(context.WithoutCancel(t.Context()))
	exec := func(query string, args ...any) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), query, args...); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
	}
	exec(`INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state, ordering_key, payload) VALUES ('shipping', 'finance', 'k', 'failed', 'o', '{}')`)
	exec(listenSQL)
	notified := func() string {
		t.Helper()
		n, err := conn.WaitForNotification(t.Context())
		pgtest.Must(t, err)
		return n.Channel + " " + n.Payload
	}
	exec(notifySQL, "shipping", "finance")
	want := notified()
	failed := inboxops.Selection{States: []string{inboxops.Failed}}
	for key, left := range map[string]int64{"o": 1, "another": 0} {
		exec("UPDATE inbox_events SET processing_state = 'failed', next_attempt_at = NULL")
		tx, err := conn.Begin(t.Context())
		pgtest.Must(t, err)
		pgtest.Exec(t, tx, lockOrderSQL, "shipping", "finance", key)
		b, err := inboxops.New(pool).Replay(t.Context(), failed, nil)
		if err != nil || b.Done != 1 || b.KeysLeft != left {
			t.Errorf("beside the lock of %q: %+v, %v, want %d keys left", key, b, err, left)
		}
		pgtest.Must(t, tx.Rollback(t.Context()))
		if got := notified(); got != want {
			t.Errorf("workers are notified by %q, want %q", got, want)
		}
	}
}
