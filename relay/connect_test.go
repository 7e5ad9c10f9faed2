package relay

import (
	"context"
	"net/url"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// The body is UTF-8 whatever the database's own encoding is.
func TestPayloadIsUTF8FromADatabaseInLatin1(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	server := relaytest.Covered(t)
	u, err := url.Parse(server.DSN)
	relaytest.Must(t, err)
	name := relaytest.Row[string](server, `SELECT current_database() || '_latin1'`)
	server.Exec(`CREATE DATABASE ` + name + ` ENCODING LATIN1 LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0`)
	t.Cleanup(func() {
		_, _ = server.Pool.Exec(context.WithoutCancel(t.Context()), `DROP DATABASE `+name+` WITH (FORCE)`)
	})
	u.Path = "/" + name
	plain := u.String()
	query := u.Query()
	query.Set("client_encoding", "UTF8")
	u.RawQuery = query.Encode()
	pgtest.Migrate(t, plain, migrations.Outbox)
	db := relaytest.At(t, u.String())
	db.DSN = plain
	db.Route()
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{"name": "Müller"}', 'key')`)
	rc := relaytest.NewReceiver(t, nil)
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Delivered, 1)
	testkit.Equal(t, "body", string(rc.All()[0].Body), `{"name": "Müller"}`)
}
