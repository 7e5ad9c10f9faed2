package relay

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relay/capacity"
	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// unconstrained drops everything that keeps odd rows out.
func unconstrained(db *relaytest.Database) {
	db.Helper()
	db.Exec(`DO $$ DECLARE c record; BEGIN
		FOR c IN SELECT conrelid::regclass AS tab, conname FROM pg_constraint
		         WHERE conrelid IN ('outbox'::regclass, 'outbox_delivery'::regclass) AND contype = 'c' LOOP
			EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', c.tab, c.conname);
		END LOOP;
		DROP TRIGGER outbox_delivery_columns_are_sane ON outbox_delivery;
		ALTER DOMAIN outbox_event_type DROP CONSTRAINT outbox_event_type_is_1_to_255_printable_ascii_no_blanks;
		ALTER DOMAIN outbox_idempotency_key DROP CONSTRAINT outbox_idempotency_key_is_1_to_255_printable_ascii;
		ALTER DOMAIN outbox_created_at DROP CONSTRAINT outbox_created_at_is_in_years_2000_to_9998;
		FOR c IN SELECT attname FROM pg_attribute WHERE attrelid = 'outbox'::regclass AND attnum > 0 AND attnotnull AND attname <> 'id' LOOP
			EXECUTE format('ALTER TABLE outbox ALTER %I DROP NOT NULL', c.attname);
		END LOOP;
	END $$`)
}

// Rows no constraint would let in each fail with a reason, and the others do not notice.
func TestPoisonRowsFailAloneWithAReason(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	unconstrained(db)
	poison := map[string]string{ // key: the other columns of the insert
		"created-infinity":     `created_at => 'infinity'`,
		"created-neg-infinity": `created_at => '-infinity'`,
		"headers-array":        `headers => '["a"]'`,
		"headers-number":       `headers => '7'`,
		"headers-nested":       `headers => '{"a": {"b": "c"}}'`,
		"headers-crlf":         `headers => '{"x-event-a": "b\r\nX-Evil: 1"}'`,
		"headers-huge":         `headers => jsonb_build_object('x-event-a', repeat('x', 2000000))`,
		"headers-name":         `headers => '{"x-event-a b": "c"}'`,
		"type-linefeed":        `event_type => E'a\nb'`,
		"version-null":         `event_version => NULL`,
		"ordering-unicode":     `ordering_key => 'ключ'`,
		"reference-escape":     `related_reference => E'\x1b[31m'`,
		"reference-long":       `related_reference => repeat('x', 1000000)`,
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
			db.Exec(fmt.Sprintf(`INSERT INTO outbox (%s) VALUES (%s)`, names, values), key)
		}
	}
	db.Insert(1000, "good")
	rc := relaytest.NewReceiver(t, nil)
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Delivered, 1000+len(odd))
	r.settles(t, policy.Fail, len(poison))

	for key := range poison {
		got := relaytest.Row[string](db, `SELECT concat_ws(' ', d.status, d.last_reason, d.attempts, d.last_error IS NOT NULL)
			FROM outbox_delivery d JOIN outbox e ON e.id = d.event_id WHERE e.idempotency_key = $1`, key)
		if got != "failed invalid_event 0 t" {
			t.Errorf("%q: %s", key, got)
		}
	}
	for _, key := range rc.Keys() {
		if _, bad := poison[key]; bad || key == "other" {
			t.Errorf("%q was sent", key)
		}
	}
	testkit.Equal(t, "requests", rc.Total(), 1000+len(odd))
	testkit.Equal(t, "failures in the alert", relaytest.Row[int](db, `SELECT count FROM outbox_alert WHERE rule = 'failed' AND subject = 'default'`), len(poison))
}

// What breaks a rule has its row, which names the rule, however long its values are: a range whose
// event could not have one would never end.
func TestValuesOfAnyLengthHaveTheirRow(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	const long = `(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 100) i)` // does not get shorter when it is compressed
	for column, value := range map[string]string{
		"ordering_key": long, "related_reference": long, "headers": `jsonb_build_object('h', repeat('x', 10000))`, "payload": `to_json(repeat('x', 1100000))`,
		"available_at": `'infinity'::timestamptz`,
	} {
		columns := map[string]string{"event_type": "'t'", "payload": "'1'", "idempotency_key": "'" + column + "'"}
		columns[column] = value
		names := slices.Sorted(maps.Keys(columns))
		var values []string
		for _, name := range names {
			values = append(values, columns[name])
		}
		db.Exec(`INSERT INTO outbox (` + strings.Join(names, ", ") + `) SELECT ` + strings.Join(values, ", "))
	}
	db.Insert(3, "good")
	rc := relaytest.NewReceiver(t, nil)
	cfg := config(db, to(rc.URL))
	cfg.History = history.New()
	r := start(t, cfg)
	r.settles(t, policy.Delivered, 3)
	r.settles(t, policy.Fail, 5)
	relaytest.Becomes(db, 0, `SELECT count(*) FROM outbox_range WHERE ended_at IS NULL`)
	testkit.Equal(t, "failed as invalid_event", relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'failed' AND last_reason = 'invalid_event' AND attempts = 0 AND last_error LIKE '%the rule outbox\_%'`), 5)
	testkit.Equal(t, "failures in the history", cfg.History.Unwritten()[history.Key{Destination: "default", EventType: "t"}].Failed, 5)
	relaytest.Becomes(db, 5, `SELECT count FROM outbox_alert WHERE rule = 'failed'`)
	testkit.Equal(t, "bytes", relaytest.Row[int](db, `SELECT max(payload_bytes) FROM outbox_delivery`), 1_100_002)
}

// The mutable rows too can hold what no statement of the relay writes.
func TestPoisonDeliveriesHarmNoOther(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	unconstrained(db)
	db.Insert(200, "good")
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
		db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', $1)`, key)
		db.Exec(`UPDATE outbox_delivery SET `+change+` WHERE event_id = (SELECT id FROM outbox WHERE idempotency_key = $1)`, key)
	}
	rc := relaytest.NewReceiver(t, nil)
	r := start(t, config(db, to(rc.URL)))
	untouched := map[string]bool{"due-infinity": true, "due-far": true, "lease-no-owner": true, "status-unknown": true}
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
		if got := relaytest.Row[string](db, `SELECT lower(d.status) FROM outbox_delivery d JOIN outbox e ON e.id = d.event_id WHERE e.idempotency_key = $1`, key); got != want {
			t.Errorf("%s is %s, want %s", key, got, want)
		}
	}
	for _, key := range rc.Keys() {
		if untouched[key] || failed[key] {
			t.Errorf("%s was sent", key)
		}
	}
	if _, err := ops.New(db.Pool).Status(t.Context(), ""); err != nil {
		t.Errorf("status: %v", err)
	}
}

// What is pending without its event cannot be sent; an alert says so to those who delete events.
func TestDeletedEventsFail(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(5, "gone")
	db.Exec(`UPDATE outbox_delivery SET payload_bytes = 2000000 WHERE event_id = 1`) // would be loaded later
	db.Exec(`DELETE FROM outbox`)
	db.Insert(5, "there")
	rc := relaytest.NewReceiver(t, nil)
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Fail, 5)
	r.settles(t, policy.Delivered, 5)
	if got := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE status = 'failed' AND last_reason = 'event_missing' AND attempts = 0`); got != 5 || rc.Total() != 5 {
		t.Errorf("%d are failed as event_missing, %d requests", got, rc.Total())
	}
}

// The event goes between the claim and the loading of its payload.
func TestEventDeletedWhileItsLargePayloadWaits(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', ('"' || repeat('x', 20000) || '"')::json, 'large')`)
	rc := relaytest.NewReceiver(t, nil)
	cfg := config(db, to(rc.URL))
	cfg.Hooks.Claimed = func(string, int) {
		if _, err := db.Pool.Exec(t.Context(), `DELETE FROM outbox`); err != nil {
			t.Error(err)
		}
	}
	r := start(t, cfg)
	r.settles(t, policy.Fail, 1)
	if got := relaytest.Row[string](db, `SELECT last_reason FROM outbox_delivery`); got != "event_missing" || rc.Total() != 0 {
		t.Errorf("%s, %d requests", got, rc.Total())
	}
}

// A delivery that takes its relays with it is set aside, and alerted, without being sent again.
func TestCrashLoopIsSetAside(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Insert(3, "key")
	db.Exec(`UPDATE outbox_delivery SET rescues = $1 WHERE event_id = 1`, capacity.CrashLoop)
	db.Exec(`UPDATE outbox_delivery SET rescues = $1 WHERE event_id = 2`, capacity.CrashLoop-1)
	// A relay died with this one while it waited to be sent alone: that proves nothing.
	db.Exec(`UPDATE outbox_delivery SET rescues = $1, claimed_by = 77, lease_expires_at = now() WHERE event_id = 3`, capacity.CrashLoop-1)
	rc := relaytest.NewReceiver(t, nil)
	r := start(t, config(db, to(rc.URL)))
	r.settles(t, policy.Fail, 1)
	r.settles(t, policy.Delivered, 1)
	relaytest.Becomes(db, true, `SELECT next_attempt_at > now() + interval '1 minute' AND rescues = $1 FROM outbox_delivery WHERE event_id = 3`, capacity.CrashLoop-1)
	if keys := rc.Keys(); len(keys) != 1 || keys[0] != "key-2" {
		t.Errorf("sent: %v", keys)
	}
	if got := relaytest.Row[int](db, `SELECT count(*) FROM outbox_delivery WHERE last_reason = 'crash_loop' AND attempts = 0 AND last_error LIKE '5 times in a row a relay died%'`); got != 1 {
		t.Errorf("%d are set aside", got)
	}
	testkit.Equal(t, "rescues are remembered after a success", relaytest.Row[int](db, `SELECT rescues FROM outbox_delivery WHERE event_id = 2`), 0)
}
