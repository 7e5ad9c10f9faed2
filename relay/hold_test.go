package relay

import (
	"testing"

	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/session"
)

// A relay that was trying a destination alone and is gone, by a crash or by a stop, keeps no other from it.
func TestTrialEndsWithItsRelay(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(t *testing.T, db *database, instance int32){
		"crash": func(t *testing.T, db *database, instance int32) {
			dead, _, err := session.Rescue(t.Context(), db.pool, instance)
			if err != nil || !dead {
				t.Errorf("not rescued: %v", err)
			}
		},
		"stop": func(t *testing.T, db *database, instance int32) {
			must(t, session.Deregister(t.Context(), db.pool, instance))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			rc := newReceiver(t, nil)
			instance := db.dead()
			db.exec(`INSERT INTO outbox_destination (destination, breaker, breaker_opened_at, breaker_until, breaker_owner)
				VALUES ('default', 'half_open', now(), now() + interval '1 day', $1)`, instance)
			db.insert(10, "key")
			leave(t, db, instance)
			start(t, db.config(to(rc.URL))).settles(t, policy.Delivered, 10)
			becomes(db, "closed", `SELECT breaker FROM outbox_destination`)
		})
	}
}
