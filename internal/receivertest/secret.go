package receivertest

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
)

// WantNoSecret asserts that no way of printing value shows the tests' secret.
func WantNoSecret(t *testing.T, value any) {
	t.Helper()
	for _, verb := range []string{"%v", "%+v", "%#v"} {
		if text := fmt.Sprintf(verb, value); strings.Contains(text, strings.TrimPrefix(SecretText, "whsec_")) || strings.Contains(text, "b3V0Ym94") {
			t.Errorf("%s of %T prints a secret", verb, value)
		}
	}
}

// StrangerLocksKey has another login take the advisory lock of the event k, until the test ends.
func (e *Env) StrangerLocksKey() {
	e.T.Helper()
	var login string
	var oid int64
	pgtest.Must(e.T, e.Pool.QueryRow(e.T.Context(), `SELECT 'stranger_' || current_database(), 'processed_events'::regclass::oid::bigint`).Scan(&login, &oid))
	e.MustExec(`CREATE ROLE ` + login + ` LOGIN`)
	stranger, err := pgx.Connect(e.T.Context(), WithSetting(e.DSN, "user", login))
	pgtest.Must(e.T, err)
	e.T.Cleanup(func() {
		_ = stranger.Close(context.Background())
		_, _ = e.Pool.Exec(context.Background(), `DROP ROLE `+login)
	})
	pgtest.Exec(e.T, stranger, `SELECT pg_advisory_lock(hashtextextended(E'test\noutbox\nk', 122550254464888 # $1::bigint))`, oid)
}
