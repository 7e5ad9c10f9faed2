package outbox_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
)

// A NOTIFY in every producing transaction would serialise their commits.
func TestProducersNotifyOnlyALiveIdleRelay(t *testing.T) {
	t.Parallel()
	const (
		insert    = `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', gen_random_uuid())`
		duplicate = `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'k') ON CONFLICT DO NOTHING`
	)
	for name, c := range map[string]struct {
		relays, statement string
		want              []string
	}{
		"no relay":             {`SELECT`, insert, nil},
		"a busy relay":         {`INSERT INTO outbox_relay (name, version, idle) VALUES ('a', '1', false)`, insert, nil},
		"an idle relay":        {`INSERT INTO outbox_relay (name, version, idle) VALUES ('a', '1', true)`, insert, []string{"public"}},
		"one of two is idle":   {`INSERT INTO outbox_relay (name, version, idle) VALUES ('a', '1', false), ('b', '1', true)`, insert, []string{"public"}},
		"a dead idle relay":    {`INSERT INTO outbox_relay (name, version, idle, heartbeat_at) VALUES ('a', '1', true, now() - interval '11 seconds')`, insert, nil},
		"many statements":      {`INSERT INTO outbox_relay (name, version, idle) VALUES ('a', '1', true)`, insert + `;` + insert, []string{"public"}},
		"a duplicate":          {`INSERT INTO outbox_relay (name, version, idle) VALUES ('a', '1', true)`, duplicate, nil},
		"a rolled back insert": {`INSERT INTO outbox_relay (name, version, idle) VALUES ('a', '1', true)`, `BEGIN;` + insert + `;ROLLBACK`, nil},
		"a producer that must not notify": {
			`INSERT INTO outbox_relay (name, version, idle) VALUES ('a', '1', true)`, `SET LOCAL outbox.notify = off; ` + insert, nil,
		},
		"an event in the future": {
			`INSERT INTO outbox_relay (name, version, idle) VALUES ('a', '1', true)`,
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
			must(t, err)
			defer listener.Close(t.Context())
			_, err = listener.Exec(t.Context(), `LISTEN outbox_wake`)
			must(t, err)

			db.exec(c.statement)
			db.exec(`NOTIFY outbox_wake, 'the end'`) // arrives after whatever the statement sent
			var got []string
			for {
				notification, err := listener.WaitForNotification(t.Context())
				must(t, err)
				if notification.Payload == "the end" {
					break
				}
				got = append(got, notification.Payload)
			}
			equal(t, "notifications", got, c.want)
		})
	}
}
