package outbox_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
)

// A NOTIFY in every producing transaction would serialise their commits.
func TestProducersNotifyOnlyALiveIdleRelay(t *testing.T) {
	t.Parallel()
	const (
		insert    = `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', gen_random_uuid())`
		duplicate = `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k') ON CONFLICT DO NOTHING`
	)
	const armed = `SELECT setval('outbox_armed', (extract(epoch FROM now()) * 1000)::bigint + 10000)`
	for name, c := range map[string]struct {
		relays, statement string
		want              []string
	}{
		"no relay":                        {`SELECT`, insert, nil},
		"a busy relay":                    {`SELECT setval('outbox_armed', 0)`, insert, nil},
		"an idle relay":                   {armed, insert, []string{"public"}},
		"a dead idle relay":               {`SELECT setval('outbox_armed', (extract(epoch FROM now()) * 1000)::bigint)`, insert, nil},
		"many statements":                 {armed, insert + `;` + insert, []string{"public"}},
		"a duplicate":                     {armed, duplicate, []string{"public"}}, // PostgreSQL computes defaults before it finds the conflict
		"a rolled back insert":            {armed, `BEGIN;` + insert + `;ROLLBACK`, nil},
		"a producer that must not notify": {armed, `SET LOCAL outbox.notify = off; ` + insert, nil},
		"an event in the future": {
			armed,
			`INSERT INTO outbox (event_type, payload, idempotency_key, available_at) VALUES ('t', '1', 'f', now() + interval '1 day')`,
			[]string{"public"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			db.exec(duplicate)
			db.exec(c.relays)
			listener, err := pgx.Connect(t.Context(), db.dsn)
			pgtest.Must(t, err)
			defer listener.Close(t.Context())
			_, err = listener.Exec(t.Context(), `LISTEN outbox_wake`)
			pgtest.Must(t, err)

			db.exec(c.statement)
			db.exec(`NOTIFY outbox_wake, 'the end'`) // arrives after whatever the statement sent
			var got []string
			for {
				notification, err := listener.WaitForNotification(t.Context())
				pgtest.Must(t, err)
				if notification.Payload == "the end" {
					break
				}
				got = append(got, notification.Payload)
			}
			equal(t, "notifications", got, c.want)
		})
	}
}
