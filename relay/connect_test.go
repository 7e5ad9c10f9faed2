package relay

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// One event with bytes that are no UTF-8 would keep all others from being taken.
func TestRunRefusesADatabaseThatIsNotInUTF8(t *testing.T) {
	t.Parallel()
	dsn := pgtest.InEncoding(t, "SQL_ASCII")
	pgtest.Migrate(t, dsn, migrations.Outbox)
	db := relaytest.At(t, dsn)
	r, err := New(config(db, to("http://127.0.0.1:1")))
	relaytest.Must(t, err)
	testkit.ErrorIs(t, "run", r.Run(t.Context()), ErrEncoding)
}
