package memory

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A goroutine that a handler has left behind may have asked where its statement goes, and not have
// sent it when the handler has returned. The transaction is not committed then, and the connection
// is closed, lest the statement goes into another's.
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
		testkit.ErrorIs(t, name, end(tx), ErrRowsOpen)
		tx.handler.calls.RUnlock()
		if !conn.IsClosed() {
			t.Errorf("%s: the connection continues", name)
		}
		if _, err := tx.handler.Exec(t.Context(), "SELECT 1"); !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("%s: a later call: %v", name, err)
		}
	}
}

// What a handler may not send, and whether it asks to undo its work.
func TestStatementsThatAreRefused(t *testing.T) {
	t.Parallel()
	const passes, refused, undone = "passes", "is refused", "is refused, and undone"
	for query, want := range map[string]string{
		"COMMIT":                                refused,
		"commit":                                refused,
		" \t\r\n\fCommit Work;":                 refused,
		"COMMIT;":                               refused,
		"COMMIT; INSERT INTO effect VALUES (1)": refused,
		"COMMIT AND CHAIN":                      refused,
		"END":                                   refused,
		"BEGIN":                                 refused,
		"BEGIN ISOLATION LEVEL SERIALIZABLE":    refused,
		"START TRANSACTION":                     refused,
		"PREPARE TRANSACTION 'x'":               refused,
		"prepare\ntransaction 'x'":              refused,
		"ROLLBACK":                              undone,
		"rollback;":                             undone,
		"ROLLBACK AND CHAIN":                    undone,
		"ROLLBACK; SELECT 1":                    undone,
		"ABORT":                                 undone,
		"ABORT AND CHAIN":                       undone,

		"":                                     passes,
		";":                                    passes,
		"SAVEPOINT s":                          passes,
		"RELEASE SAVEPOINT s":                  passes,
		"ROLLBACK TO s":                        passes,
		"rollback to savepoint s":              passes,
		"ROLLBACK WORK TO SAVEPOINT s":         passes,
		"ROLLBACK TRANSACTION TO s":            passes,
		"PREPARE":                              passes,
		"PREPARE finish AS SELECT 1":           passes,
		"EXECUTE finish":                       passes,
		"INSERT INTO effect VALUES ('COMMIT')": passes,
		"commit_order":                         passes, // names of prepared statements
		"begin-work":                           passes,
		"rollbacks":                            passes,
		"endless":                              passes,
		"/* */ COMMIT":                         passes, // shows at the end
		"-- \nCOMMIT":                          passes,
		"SELECT 1; COMMIT":                     passes,
	} {
		got := passes
		if ends, undoes := endsTransaction(query); undoes {
			got = undone
		} else if ends {
			got = refused
		}
		if got != want {
			t.Errorf("%q %s, want that it %s", query, got, want)
		}
	}
}

type mute struct{}

func (mute) Error() string { panic("no text") }

func TestConfigRedactComesFirst(t *testing.T) {
	t.Parallel()
	s := &Settings{Redact: func(text string) string {
		return strings.ReplaceAll(text, "Ada", "password=secret") + "\n"
	}}
	testkit.Equal(t, "got", s.Redacted(errors.New("ship to Ada now")), "ship to password=*** now")
	for name, s := range map[string]*Settings{
		"its own text":  {},
		"Config.Redact": {Redact: func(string) string { panic("no") }},
	} {
		if got := s.Redacted(mute{}); !strings.Contains(got, "panicked") {
			t.Errorf("%s: got %q", name, got)
		}
	}
	testkit.Equal(t, "got", (&Settings{}).Redacted(fmt.Errorf("wait: %w", context.Canceled)), "wait: context canceled")
}
