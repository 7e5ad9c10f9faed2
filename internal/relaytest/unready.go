package relaytest

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
)

// An Unready is a destination of a log that cannot store events, or not all of them, until a person
// fixes something.
type Unready struct {
	Settings string // the destination's, as YAML in a line; from Fix on with what that returns
	// Problem is what run logs at the start, and config check --connect reports, with exit code 6.
	// Empty: they find none.
	Problem string
	// Warning is what run logs at the start of a destination that works, and config check --connect
	// reports.
	Warning string
	// Attempt is the error of the attempts until Fix; empty: that of Problem, or none after a
	// Warning.
	Attempt string
	// Refused is the error of the one event that fails, since it is larger than LargeEvent; empty:
	// it is delivered.
	Refused string
	// Fix fixes it, and returns the settings from then on; empty: those of before.
	Fix func() (settings string)
	// Stored returns the idempotency keys that the log holds.
	Stored func() []string
}

// What a relay logs at the start.
const (
	notReady  = "destination is not ready: its events wait, and nothing is lost; other destinations continue"
	halfReady = "destination is ready, but it will not store all events as they should be"
)

// LargeEvent is the size of the payload of the largest event that destinations are tried with, in
// bytes.
const LargeEvent = 6000

// CheckUnready runs one relay with all destinations, and a good one beside them. It shows that each
// is reported at the start, that the good one gets its events, that the others' events wait, and
// that they arrive once each is fixed, without a reload unless the settings change.
func CheckUnready(t *testing.T, program, good string, all map[string]Unready) {
	t.Helper()
	names := []string{"good"}
	for name := range all {
		names = append(names, name)
	}
	db := New(t, names...)
	p := NewProgram(db, program)
	configureUnready(p, good, all, nil)
	checkConnect(p, all)
	relay := p.Run()
	for name, u := range all {
		if u.Problem != "" {
			relay.Logs(name, notReady, u.Problem)
		}
		if u.Warning != "" {
			relay.Logs(name, halfReady, u.Warning)
		}
	}
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '{"n": 1}', 'small-' || i FROM generate_series(1, 5) i`)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', json_build_object('pad', repeat('x', $1)), 'large'`, LargeEvent-20)
	Becomes(db, 6, `SELECT count(*)::int FROM outbox_delivery WHERE destination = 'good' AND status = 'delivered'`)
	for name, u := range all {
		checkWaiting(db, name, u)
	}
	mended := map[string]string{}
	for name, u := range all {
		if u.Fix != nil {
			mended[name] = u.Fix()
		}
	}
	for name, u := range all {
		if mended[name] == "" && u.Refused == "" { // a reload could hide that the relay does not recover
			Becomes(db, 6, `SELECT count(*)::int FROM outbox_delivery WHERE destination = $1 AND status = 'delivered'`, name)
		}
	}
	configureUnready(p, good, all, mended)
	relay.Reload()
	for name, u := range all {
		if u.Refused != "" {
			if code, _, stderr := p.Command("replay", "--yes", "--destination", name); code != 0 {
				t.Errorf("%s: replay ends with %d\n%s", name, code, stderr)
			}
		}
	}
	Becomes(db, 6*len(names), `SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered'`)
	for name, u := range all {
		checkStored(t, name, u)
	}
	Becomes(db, 0, `SELECT count(*)::int FROM outbox_alert WHERE rule = 'breaker_open' AND resolved_at IS NULL`)
}

// configureUnready writes the configuration: the mended settings, where a destination has some.
func configureUnready(p *Program, good string, all map[string]Unready, mended map[string]string) {
	text := "defaults:\n  timeout: 2s\n  retry: {schedule: [1s]}\n  breaker: {probe_after: 100ms, probe_max: 500ms}\n" +
		"destinations:\n  good: {" + good + "}\n"
	for name, u := range all {
		text += fmt.Sprintf("  %s: {%s}\n", name, cmp.Or(mended[name], u.Settings))
	}
	p.Configure(text)
}

// checkStored checks that the log of a destination has every event.
func checkStored(t *testing.T, name string, u Unready) {
	t.Helper()
	keys := map[string]bool{}
	for _, key := range u.Stored() {
		keys[key] = true
	}
	if len(keys) != 6 {
		t.Errorf("%s: the log holds %v, want 6 events", name, keys)
	}
}

// checkConnect checks that config check accepts the settings, and with --connect reports each
// problem.
func checkConnect(p *Program, all map[string]Unready) {
	p.Helper()
	if code, _, stderr := p.Command("config", "check"); code != 0 {
		p.Errorf("config check ends with %d\n%s", code, stderr)
	}
	code, stdout, stderr := p.Command("config", "check", "--connect")
	if code != 6 || !strings.Contains(stdout, "good is reached\n") {
		p.Errorf("config check --connect ends with %d\n%s", code, stdout)
	}
	for name, u := range all {
		found := ""
		for line := range strings.Lines(stderr) {
			if _, text, ok := strings.Cut(line, "destinations."+name+": "); ok {
				found += text
			}
		}
		if !strings.Contains(found, u.Problem) || !strings.Contains(found, u.Warning) || (found == "") != (u.Problem == "" && u.Warning == "") {
			p.Errorf("%s: config check --connect reports %q, want %q", name, found, u.Problem+u.Warning)
		}
	}
}

// checkWaiting checks what became of the events of one destination before it was fixed.
func checkWaiting(db *Database, name string, u Unready) {
	db.Helper()
	attempt := u.Attempt
	if attempt == "" {
		attempt = u.Problem
	}
	if attempt == "" && u.Refused != "" {
		Becomes(db, true, `SELECT coalesce(bool_or(last_error LIKE '%' || $2 || '%'), false) FROM outbox_delivery WHERE destination = $1 AND status = 'failed'`, name, u.Refused)
		Becomes(db, 5, `SELECT count(*)::int FROM outbox_delivery WHERE destination = $1 AND status = 'delivered'`, name)
		return
	}
	if attempt == "" {
		Becomes(db, 6, `SELECT count(*)::int FROM outbox_delivery WHERE destination = $1 AND status = 'delivered'`, name)
		return
	}
	held := ""
	defer func() {
		if strings.Count(held, attempt) != 2 {
			db.Logf("%s: want %q twice, got %q", name, attempt, held)
		}
	}()
	Eventually(db, name+" is held and alerted", func() bool {
		held = Row[string](db, `SELECT coalesce(string_agg(concat_ws(' ', breaker, breaker_error, first_error), '; '), '')
			FROM outbox_destination LEFT JOIN outbox_alert ON rule = 'breaker_open' AND subject = destination AND resolved_at IS NULL WHERE destination = $1`, name)
		return !strings.HasPrefix(held, "closed") && strings.Count(held, attempt) == 2
	})
	if lost := Row[int](db, `SELECT count(*)::int FROM outbox_delivery WHERE destination = $1 AND status <> 'pending'`, name); lost != 0 {
		db.Errorf("%s: %d events do not wait", name, lost)
	}
}
