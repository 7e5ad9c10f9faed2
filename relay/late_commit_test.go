package relay

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Who reads by "id > cursor" loses what commits late. A's transaction is open while B, inserted after
// it, is delivered and the lane's position moves past A's place.
func TestLateCommitsAreDelivered(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		age  string
		poll time.Duration
	}{
		// So young that looking back over the overlap must find it: the next sweep is an hour away.
		"within the overlap": {"0 seconds", time.Hour},
		// Found by the sweep alone.
		"beyond the overlap": {"1 minute", time.Second},
		"a day old":          {"1 day", time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			rc := newReceiver(t, nil)
			cfg := db.config(to(rc.URL))
			cfg.PollInterval = c.poll
			r := start(t, cfg)
			r.await(t, "idleness", func(o *observer) bool { return o.idle > 0 })

			late, err := pgx.Connect(t.Context(), db.dsn)
			must(t, err)
			defer func() { _ = late.Close(t.Context()) }()
			exec := func(statement string) {
				t.Helper()
				_, err := late.Exec(t.Context(), statement)
				must(t, err)
			}
			exec(`BEGIN`)
			exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '1', 'late')`)
			exec(`UPDATE outbox_delivery SET next_attempt_at = next_attempt_at - interval '` + c.age + `'`)
			db.insert(3, "early")
			r.settles(t, Delivered, 3)
			exec(`COMMIT`)
			r.settles(t, Delivered, 4)
			if keys := rc.keys(); len(keys) != 4 || keys[3] != "late" {
				t.Errorf("%v", keys)
			}
		})
	}
}
