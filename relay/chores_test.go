package relay

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// Everything that a relay does beside delivering meets a database that is slow there. Deliveries
// keep their connections.
func TestHousekeepingHoldsOneConnection(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(1, "parked")
	db.Exec(`UPDATE outbox_delivery SET destination = ''; INSERT INTO outbox_destination (destination, parked_after) VALUES ('default', 0)`)
	db.Exec(`INSERT INTO outbox_alert (rule, subject, count) VALUES ('failed', 'default', 1)`)
	db.Exec(`CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			PERFORM pg_sleep(1);
			IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
			RETURN NEW; END $$;
		CREATE TRIGGER slow BEFORE UPDATE ON outbox_watch FOR EACH ROW EXECUTE FUNCTION slow();
		CREATE TRIGGER slow BEFORE INSERT OR UPDATE ON outbox_alert_notice FOR EACH ROW EXECUTE FUNCTION slow();
		CREATE TRIGGER slow BEFORE DELETE ON outbox_delivery FOR EACH ROW EXECUTE FUNCTION slow()`)
	rc := relaytest.NewReceiver(t, nil)
	cfg := config(db, to(rc.URL))
	cfg.Watching.Interval = 10 * time.Millisecond
	r := start(t, cfg)
	most, delivered := 0, 0
	relaytest.Eventually(t, "the parked delivery", func() bool {
		most = max(most, relaytest.Row[int](db, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'outbox-relay' AND wait_event = 'PgSleep'`))
		delivered++
		db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', gen_random_uuid())`)
		r.settles(t, policy.Delivered, delivered)
		return relaytest.Row[bool](db, `SELECT (SELECT count(*) FROM outbox_delivery WHERE destination = '') = 0
			AND (SELECT count(*) FROM outbox_alert_notice) > 0 AND (SELECT watched_at > now() - interval '1 minute' FROM outbox_watch)`)
	})
	if most != 1 {
		t.Errorf("housekeeping held %d connections", most)
	}
}
