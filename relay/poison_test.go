package relay

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// unruled lifts the rules of an event, which a disabled trigger or another program may have got past.
func (db *database) unruled() {
	db.Helper()
	db.exec(`CREATE OR REPLACE FUNCTION outbox_refuse(rule text, idempotency_key text) RETURNS integer LANGUAGE sql AS 'SELECT 0'`)
}

// unconstrained drops everything that keeps odd rows out.
func (db *database) unconstrained() {
	db.Helper()
	db.unruled()
	db.exec(`DO $$ DECLARE c record; BEGIN
		FOR c IN SELECT conrelid::regclass AS tab, conname FROM pg_constraint
		         WHERE conrelid IN ('outbox'::regclass, 'outbox_delivery'::regclass) AND contype = 'c' LOOP
			EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', c.tab, c.conname);
		END LOOP;
		DROP TRIGGER outbox_delivery_columns_are_sane ON outbox_delivery;
		ALTER DOMAIN outbox_created_at DROP CONSTRAINT outbox_created_at_is_in_years_2000_to_9998;
		FOR c IN SELECT attname FROM pg_attribute WHERE attrelid = 'outbox'::regclass AND attnum > 0 AND attnotnull AND attname <> 'id' LOOP
			EXECUTE format('ALTER TABLE outbox ALTER %I DROP NOT NULL', c.attname);
		END LOOP;
	END $$`)
}

// Rows no constraint would let in each fail with a reason, and the others do not notice.
func TestPoisonRowsFailAloneWithAReason(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.unconstrained()
	poison := map[string]string{ // key: the other columns of the insert
		"created-infinity":     `created_at => 'infinity'`,
		"created-neg-infinity": `created_at => '-infinity'`,
		"headers-array":        `headers => '["a"]'`,
		"headers-number":       `headers => '7'`,
		"headers-nested":       `headers => '{"a": {"b": "c"}}'`,
		"headers-crlf":         `headers => '{"A": "b\r\nX-Evil: 1"}'`,
		"headers-huge":         `headers => jsonb_build_object('A', repeat('x', 2000000))`,
		"headers-name":         `headers => '{"a b": "c"}'`,
		"type-linefeed":        `event_type => E'a\nb'`,
		"version-null":         `event_version => NULL`,
		"ordering-unicode":     `ordering_key => 'ключ'`,
		"reference-escape":     `related_reference => E'\x1b[31m'`,
		"key-\x01-control":     ``,
		"key-\u202e-unicode":   ``,
		"key-crlf\r\nX-Evil:1": ``,
	}
	odd := map[string]string{ // these are strange, but can be sent
		"created-bc":       `created_at => '0044-03-15 BC'`,
		"created-far":      `created_at => '294276-12-31'`,
		"version-negative": `event_version => -5`,
		"deep":             `payload => (repeat('[', 5000) || repeat(']', 5000))::json`,
		"trace-malformed":  `headers => '{"traceparent": "not a trace"}'`,
		"reserved":         `headers => '{"x-IDEMPOTENCY-key": "other"}'`, // are left out
		"of-contract":      `headers => '{"X-Outbox-Replay": "true"}'`,
		"markup":           `event_type => '<script>alert(1)</script>'`,
	}
	for _, set := range []map[string]string{poison, odd} {
		for key, columns := range set {
			names, values := "idempotency_key", "$1::text"
			given := map[string]string{"event_type": "'t'", "payload": "'{}'"}
			if name, value, ok := strings.Cut(columns, " => "); ok {
				given[name] = value
			}
			for name, value := range given {
				names, values = names+", "+name, values+", "+value
			}
			db.exec(fmt.Sprintf(`INSERT INTO outbox (%s) VALUES (%s)`, names, values), key)
		}
	}
	db.insert(1000, "good")
	rc := newReceiver(t, nil)
	r := start(t, db.config(to(rc.URL)))
	r.settles(t, policy.Delivered, 1000+len(odd))
	r.settles(t, policy.Fail, len(poison))

	for key := range poison {
		got := row[string](db, `SELECT concat_ws(' ', d.status, d.last_reason, d.attempts, d.last_error IS NOT NULL)
			FROM outbox_delivery d JOIN outbox e ON e.id = d.event_id WHERE e.idempotency_key = $1`, key)
		if got != "failed invalid_event 0 t" {
			t.Errorf("%q: %s", key, got)
		}
	}
	for _, key := range rc.keys() {
		if _, bad := poison[key]; bad || key == "other" {
			t.Errorf("%q was sent", key)
		}
	}
	if rc.total() != 1000+len(odd) {
		t.Errorf("%d requests", rc.total())
	}
	if got := row[int](db, `SELECT count FROM outbox_alert WHERE rule = 'failed' AND subject = 'default'`); got != len(poison) {
		t.Errorf("%d failures in the alert", got)
	}
}

// The mutable rows too can hold what no statement of the relay writes.
func TestPoisonDeliveriesHarmNoOther(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.unconstrained()
	db.insert(200, "good")
	odd := map[string]string{
		"due-infinity":     `next_attempt_at = 'infinity'`,
		"due-neg-infinity": `next_attempt_at = '-infinity'`,
		"due-bc":           `next_attempt_at = '4713-01-01 BC'`,
		"due-far":          `next_attempt_at = '294276-01-01'`,
		"attempts-minus":   `attempts = -1`,
		"claim-minus":      `claim = -1`,
		"rescues-max":      `rescues = 32767`,
		"leased-for-ever":  `claimed_by = 99, lease_expires_at = 'infinity'`,
		"owner-no-lease":   `claimed_by = 99`,
		"lease-no-owner":   `lease_expires_at = now() + interval '1 day'`,
		"rescues-minus":    `rescues = -1`,
		"promise-bc":       `not_after = '-infinity'`,
		"promise-infinity": `not_after = 'infinity'`,
		"status-unknown":   `status = 'Pending'`,
		"bytes-wrong":      `payload_bytes = 2147483647`,
		"bytes-minus":      `payload_bytes = -1`,
		"delivered-before": `delivered_at = now(), attempts = 3`,
		"last-at-infinity": `last_attempt_at = 'infinity'`,
	}
	for key, change := range odd {
		db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', $1)`, key)
		db.exec(`UPDATE outbox_delivery SET `+change+` WHERE event_id = (SELECT id FROM outbox WHERE idempotency_key = $1)`, key)
	}
	rc := newReceiver(t, nil)
	r := start(t, db.config(to(rc.URL)))
	untouched := map[string]bool{"due-infinity": true, "due-far": true, "leased-for-ever": true, "lease-no-owner": true, "status-unknown": true}
	failed := map[string]bool{"rescues-max": true, "promise-bc": true, "promise-infinity": true}
	r.settles(t, policy.Delivered, 200)
	r.settles(t, policy.Delivered, 200+len(odd)-len(untouched)-len(failed))
	r.settles(t, policy.Fail, len(failed))
	for key := range odd {
		want := "delivered"
		if untouched[key] {
			want = "pending"
		} else if failed[key] {
			want = "failed"
		}
		if got := row[string](db, `SELECT lower(d.status) FROM outbox_delivery d JOIN outbox e ON e.id = d.event_id WHERE e.idempotency_key = $1`, key); got != want {
			t.Errorf("%s is %s, want %s", key, got, want)
		}
	}
	for _, key := range rc.keys() {
		if untouched[key] || failed[key] {
			t.Errorf("%s was sent", key)
		}
	}
	if _, err := ops.New(db.pool).Status(t.Context(), ""); err != nil {
		t.Errorf("status: %v", err)
	}
}

// One row whose outcome the database refuses, here by a trigger of the application's and by an overflow, keeps neither
// the others of its batch nor the other destinations. It is attempted again when its lease ends.
func TestRefusedOutcomeKeepsNoOther(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(300, "key")
	db.exec(`UPDATE outbox_delivery SET attempts = 2147483647 WHERE event_id = 7`)
	db.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF NEW.event_id = 77 AND NEW.status = 'delivered' THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON outbox_delivery FOR EACH ROW EXECUTE FUNCTION refuse()`)
	rc := newReceiver(t, nil)
	r := start(t, db.config(to(rc.URL)))
	r.settles(t, policy.Delivered, 298)
	r.await(t, "the refusals", func(o *observer) bool { return o.failures["settle"] >= 2 })
	got := rows[int64](db, `SELECT event_id FROM outbox_delivery WHERE status = 'pending' AND claimed_by IS NOT NULL ORDER BY 1`)
	if !slices.Equal(got, []int64{7, 77}) {
		t.Errorf("pending are %v", got)
	}
	db.exec(`DROP TRIGGER refuse ON outbox_delivery; UPDATE outbox_delivery SET attempts = 1, lease_expires_at = now() WHERE status = 'pending'`)
	r.settles(t, policy.Delivered, 300)
	r.stop()
}

// damage makes the server unable to write the outcome of the given events to a destination, as if a page were damaged.
func (db *database) damage(destination string, upTo int) {
	db.Helper()
	db.exec(fmt.Sprintf(`CREATE FUNCTION damaged() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF NEW.event_id <= %d AND NEW.destination = '%s' AND NEW.claimed_by IS NULL THEN
				RAISE EXCEPTION 'invalid page in block 7 of relation base/1/2' USING ERRCODE = 'data_corrupted';
			END IF;
			RETURN NEW; END $$;
		CREATE TRIGGER damaged BEFORE UPDATE ON outbox_delivery FOR EACH ROW EXECUTE FUNCTION damaged()`, upTo, destination))
}

// A page of the table is damaged: the outcomes of its rows cannot be written, all others can. Once it is mended they are
// written without another request.
func TestDamagedRowKeepsNoOther(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t, "a", "b")
	db.insert(300, "key")
	db.damage("a", 3)
	rc := newReceiver(t, nil)
	toA, toB := to(rc.URL), to(rc.URL)
	toA.Name, toB.Name = "a", "b"
	r := start(t, db.config(toA, toB))
	r.settles(t, policy.Delivered, 597)
	db.insert(300, "later")
	r.settles(t, policy.Delivered, 1197)
	got := rows[int64](db, `SELECT event_id FROM outbox_delivery WHERE status = 'pending' AND claimed_by IS NOT NULL ORDER BY 1`)
	if !slices.Equal(got, []int64{1, 2, 3}) {
		t.Errorf("pending are %v", got)
	}
	db.exec(`DROP TRIGGER damaged ON outbox_delivery`)
	r.settles(t, policy.Delivered, 1200)
	if rc.total() != 1200 || r.lane("a").busy() {
		t.Errorf("%d requests for 1200 deliveries, or a lane without room", rc.total())
	}
}

// Damaged rows fill a lane. It goes on when their leases have ended.
func TestDamagedRowsKeepNoLane(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	const damaged = 10 // more than the lane holds
	db.insert(damaged, "bad")
	db.damage("default", damaged)
	rc := newReceiver(t, nil)
	d := to(rc.URL)
	d.MaxInFlight, d.Timeout = 1, 100*time.Millisecond
	cfg := db.config(d)
	cfg.Lease = d.Timeout + leaseMargin
	r := start(t, cfg)
	eventually(t, "a full lane", func() bool { return rc.total() >= 2 })
	db.insert(3, "good")
	r.settles(t, policy.Delivered, 3)
}

// What is pending without its event cannot be sent; an alert says so to those who delete events.
func TestDeletedEventsFail(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(5, "gone")
	db.exec(`UPDATE outbox_delivery SET payload_bytes = 2000000 WHERE event_id = 1`) // would be loaded later
	db.exec(`DELETE FROM outbox`)
	db.insert(5, "there")
	rc := newReceiver(t, nil)
	r := start(t, db.config(to(rc.URL)))
	r.settles(t, policy.Fail, 5)
	r.settles(t, policy.Delivered, 5)
	if got := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'failed' AND last_reason = 'event_missing' AND attempts = 0`); got != 5 || rc.total() != 5 {
		t.Errorf("%d are failed as event_missing, %d requests", got, rc.total())
	}
}

// The event goes between the claim and the loading of its payload.
func TestEventDeletedWhileItsLargePayloadWaits(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', ('"' || repeat('x', 20000) || '"')::json, 'large')`)
	rc := newReceiver(t, nil)
	cfg := db.config(to(rc.URL))
	cfg.Hooks.Claimed = func(string, int) {
		if _, err := db.pool.Exec(t.Context(), `DELETE FROM outbox`); err != nil {
			t.Error(err)
		}
	}
	r := start(t, cfg)
	r.settles(t, policy.Fail, 1)
	if got := row[string](db, `SELECT last_reason FROM outbox_delivery`); got != "event_missing" || rc.total() != 0 {
		t.Errorf("%s, %d requests", got, rc.total())
	}
}

// A destination that this relay does not know, or knows no more, keeps its deliveries.
func TestUnknownDestinationsWait(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "default", "retired")
	db.insert(3, "key")
	rc := newReceiver(t, nil)
	cfg := db.config(to(rc.URL))
	r := start(t, cfg)
	r.settles(t, policy.Delivered, 3)
	r.await(t, "idleness", func(o *observer) bool { return o.idle > 0 })
	if got := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE destination = 'retired' AND status = 'pending' AND claim = 0`); got != 3 {
		t.Errorf("%d of 3 wait", got)
	}
	// The configuration is the truth about routes.
	if got := row[string](db, `SELECT string_agg(destination, ',') FROM outbox_route`); got != "default" {
		t.Errorf("routes to %s", got)
	}
}

// A delivery that takes its relays with it is set aside, and alerted, without being sent again.
func TestCrashLoopIsSetAside(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.insert(3, "key")
	db.exec(`UPDATE outbox_delivery SET rescues = $1 WHERE event_id = 1`, policy.CrashLoop)
	db.exec(`UPDATE outbox_delivery SET rescues = $1 WHERE event_id = 2`, policy.CrashLoop-1)
	// A relay died with this one while it waited to be sent alone: that proves nothing.
	db.exec(`UPDATE outbox_delivery SET rescues = $1, claimed_by = 77, lease_expires_at = now() WHERE event_id = 3`, policy.CrashLoop-1)
	rc := newReceiver(t, nil)
	r := start(t, db.config(to(rc.URL)))
	r.settles(t, policy.Fail, 1)
	r.settles(t, policy.Delivered, 1)
	becomes(db, true, `SELECT next_attempt_at > now() + interval '1 minute' AND rescues = $1 FROM outbox_delivery WHERE event_id = 3`, policy.CrashLoop-1)
	if keys := rc.keys(); len(keys) != 1 || keys[0] != "key-2" {
		t.Errorf("sent: %v", keys)
	}
	if got := row[int](db, `SELECT count(*) FROM outbox_delivery WHERE last_reason = 'crash_loop' AND attempts = 0 AND last_error LIKE '5 times in a row a relay died%'`); got != 1 {
		t.Errorf("%d are set aside", got)
	}
	if got := row[int](db, `SELECT rescues FROM outbox_delivery WHERE event_id = 2`); got != 0 {
		t.Errorf("%d rescues are remembered after a success", got)
	}
}

// A defect that one delivery trips is an attempt of that delivery and nothing to the others.
func TestPanicOfOneDelivery(t *testing.T) {
	t.Parallel()
	d := Config{Destinations: []post.Destination{to("http://127.0.0.1:1/")}}.withDefaults().Destinations[0]
	l, err := laneTo(d)
	must(t, err)
	broken := order()
	broken.leaseEnds = time.Now().Add(time.Hour)
	broken.promiseEnds = broken.leaseEnds
	broken.event.Payload = nil // and there is no store to load it from
	v := first(loneSenders(t).attempt(l, &broken), d.Responses)
	if v.Outcome != policy.Retry || v.Reason != policy.ReasonPanic || !strings.Contains(v.Message, "nil pointer") {
		t.Errorf("%+v", v)
	}
}
