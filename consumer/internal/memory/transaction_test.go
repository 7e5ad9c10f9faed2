package memory

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A goroutine that a handler has left behind may have asked where its statement goes, and not have sent it when the handler
// has returned. The transaction is not committed then, and the connection is closed, lest the statement goes into another's.
func TestCallUnderWayWhenTheHandlerReturns(t *testing.T) {
	t.Parallel()
	db := &PgxDatabase{Pool: pgtest.Pool(t, pgtest.New(t, migrations.Inbox)), Timeout: time.Minute}
	var one int
	for name, end := range map[string]func(*PgxTransaction) error{
		"commit": func(tx *PgxTransaction) error { return tx.Commit(t.Context(), "SELECT 1", nil) },
		"rollback": func(tx *PgxTransaction) error {
			tx.Rollback()
			return ErrRowsOpen
		},
	} {
		begun, err := db.Begin(t.Context(), func(row pgx.Row) error { return row.Scan(&one) }, "SELECT 1", nil)
		pgtest.Must(t, err)
		tx, ok := begun.(*PgxTransaction)
		if !ok {
			t.Fatalf("begun %T", begun)
		}
		conn := tx.conn.Conn()
		tx.handler.calls.RLock() // where every call begins
		if err := end(tx); !errors.Is(err, ErrRowsOpen) {
			t.Errorf("%s: %v", name, err)
		}
		tx.handler.calls.RUnlock()
		if !conn.IsClosed() {
			t.Errorf("%s: the connection goes on", name)
		}
		if _, err := tx.handler.Exec(t.Context(), "SELECT 1"); !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("%s: a later call: %v", name, err)
		}
	}
}
