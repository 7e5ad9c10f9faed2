package ops

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// What a person says of an alert stands in status and the audit. A silence covers what it names,
// until it is ended.
func TestAlertsAreAcknowledgedAndSilenced(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_alert (rule, subject, due_at) VALUES ('breaker_open', 'shop', NULL), ('failed', 'mail', NULL)`)
	o := New(db.Pool).As(Actor{Name: "ada"})
	db.Exec(`INSERT INTO outbox_route VALUES ('r', 'route'); INSERT INTO outbox_relay (name, version) VALUES ('relay', '');
		INSERT INTO outbox_alert_past (rule, subject, began_at, resolved_at, returned, count, notices) VALUES ('lag', 'was', now(), now(), 0, 1, '[]')`)
	relaytest.Must(t, o.AcknowledgeAlert(t.Context(), alert.RuleBreakerOpen, "shop"))
	testkit.ErrorIs(t, "an alert that is not open", o.AcknowledgeAlert(t.Context(), alert.RuleBreakerOpen, "mail"), ErrNoAlert)
	testkit.ErrorIs(t, "a rule that does not exist", o.SilenceAlerts(t.Context(), "nothing", "", time.Hour, ""), ErrUnknownRule)
	for _, known := range []string{"shop", "route", "relay", relaytest.Row[string](db, `SELECT current_database()`), "was"} {
		relaytest.Must(t, o.checkSubject(t.Context(), known))
	}
	unknown, is := errors.AsType[UnknownSubject](o.SilenceAlerts(t.Context(), "", "shpo", time.Hour, ""))
	if !is || !slices.Contains(unknown.Known, "shop") || relaytest.Row[int](db, `SELECT count(*) FROM outbox_alert_silence`) != 0 {
		t.Errorf("a misspelt subject: %+v", unknown)
	}
	relaytest.Must(t, o.SilenceAlerts(t.Context(), "", "mail", time.Hour, "moves"))
	open := func() string {
		t.Helper()
		s, err := o.Status(t.Context(), "")
		relaytest.Must(t, err)
		var all []string
		for _, a := range s.Alerts {
			all = append(all, a.Rule+" "+a.AcknowledgedBy+map[bool]string{true: "silent"}[a.SilentUntil != nil])
		}
		slices.Sort(all)
		return strings.Join(all, ", ")
	}
	testkit.Equal(t, "open", open(), "breaker_open ada, failed silent")
	if got, err := o.Silences(t.Context()); err != nil || len(got) != 1 || got[0].Subject != "mail" || got[0].CreatedBy != "ada" || got[0].Reason != "moves" {
		t.Errorf("silences: %+v, %v", got, err)
	}
	// All that was changed is looked at again.
	testkit.Equal(t, "alerts are due", relaytest.Row[int](db, `SELECT count(*) FROM outbox_alert WHERE due_at <= now()`), 2)
	relaytest.Must(t, o.SilenceAlerts(t.Context(), "", "mail", 0, ""))
	testkit.Equal(t, "open", open(), "breaker_open ada, failed ")
	db.Exec(`UPDATE outbox_alert SET resolved_at = now(); UPDATE outbox_alert SET resolved_at = NULL`)
	testkit.Equal(t, "what returned is known", open(), "breaker_open , failed ")
	entries, err := o.Audit(t.Context(), 0, 0)
	relaytest.Must(t, err)
	var actions []string
	for _, e := range entries {
		actions = append(actions, e.Actor+" "+e.Action+" "+*e.Detail)
	}
	if want := []string{
		"ada silence_alerts all rules of mail for 0s", "ada silence_alerts all rules of mail for 1h0m: moves", "ada acknowledge_alert breaker_open shop",
	}; !slices.Equal(actions, want) {
		t.Errorf("audit: %q", actions)
	}
}

// A reload that was refused and relays that differ are advised about, each once, whether or not an
// alert is open.
func TestStatusShowsWhatRelaysSayOfThemselves(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_relay (id, name, version, reload_error, reload_failed_at) OVERRIDING SYSTEM VALUE
		VALUES (1, 'a', '1', NULL, NULL), (2, 'b', '1', 'routes: there are none.', now()), (3, 'c', '1', NULL, NULL)`)
	db.Exec(`INSERT INTO outbox_relay_destination (relay_id, destination, settings, secrets)
		VALUES (1, 'shop', 's', 'x'), (2, 'shop', 's', 'y'), (3, 'shop', 's', 'x'), (1, 'mail', 's', 'x'), (2, 'mail', 's', 'x'), (3, 'mail', '', '')`)
	db.Exec(`INSERT INTO outbox_alert (rule, subject) VALUES ('reload_refused', 'b'), ('relays_differ', 'shop')`)
	s, err := New(db.Pool).Status(t.Context(), "")
	relaytest.Must(t, err)
	var said []string
	for _, a := range s.Advice {
		said = append(said, a.String())
	}
	for _, want := range []string{
		`Relay "b" refused its new configuration: routes: there are none. Correct the configuration`,
		`Relays differ in the settings of "shop": other secrets at b than at a and c. Give all relays the same`,
	} {
		if n := strings.Count(strings.Join(said, "\n"), want); n != 1 {
			t.Errorf("%q is said %d times in\n%s", want, n, strings.Join(said, "\n"))
		}
	}
	if len(said) != 2 || s.Relays[1].ReloadError == "" {
		t.Errorf("%q, %+v", said, s.Relays)
	}

	db.Exec(`UPDATE outbox_relay_destination SET refused_at = now(), refused_error = '401 Unauthorized' WHERE relay_id = 2 AND destination = 'shop'`)
	db.Exec(`UPDATE outbox_relay_destination SET refused_at = now(), refused_error = 'dial tcp: connection refused' WHERE relay_id <> 1 AND destination = 'mail'`)
	db.Exec(`INSERT INTO outbox_alert (rule, subject) VALUES ('relay_refused', 'shop')`)
	wantAdvice(db,
		`Relay "b" refused its new configuration: routes: there are none.`,
		`Only relays b and c are refused by "mail": dial tcp: connection refused. The other relays deliver.`,
		`Only relay b is refused by "shop": 401 Unauthorized. The other relays deliver. Relays have other secrets at b than at a and c.`,
	)

	db.Exec(`UPDATE outbox_relay SET name = 'vm', reload_error = 'routes: there are none.'`) // all of one host
	wantAdvice(db,
		`Relay "vm (id 1)" refused its new configuration: routes: there are none.`,
		`Relay "vm (id 2)" refused its new configuration: routes: there are none.`,
		`Relay "vm (id 3)" refused its new configuration: routes: there are none.`,
		`Only relays vm (id 2) and vm (id 3) are refused by "mail": dial tcp: connection refused. The other relays deliver.`,
		`Only relay vm (id 2) is refused by "shop": 401 Unauthorized. The other relays deliver. `+
			`Relays have other secrets at vm (id 2) than at vm (id 1) and vm (id 3).`,
	)
}

// A relay that is quarantined beside others that work is named alone, by every command.
func TestQuarantineBesideRelaysThatWork(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Serve("default")
	db.Exec(`INSERT INTO outbox_relay (name, version, quarantined) VALUES ('other', '', 'its environment is "staging", recorded is "shop"')`)
	wantAdvice(db, `Relay "other" is quarantined and sends nothing, while others work: its environment is "staging", recorded is "shop".`)
	s, err := New(db.Pool).Status(t.Context(), "")
	relaytest.Must(t, err)
	if s.Quarantined != "" || s.Advice[0].Level != Warning {
		t.Errorf("%q, %+v", s.Quarantined, s.Advice)
	}
	db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() - interval '1 minute' WHERE name = 'test'`)
	wantAdvice(db, `Nothing is claimed or sent: its environment is "staging", recorded is "shop".`)
}

// Of a relay that is gone, or where no relay may be accepted, nothing is said of others that
// deliver.
func TestRefusedAloneNeedsAnotherThatMayBeAccepted(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec(`INSERT INTO outbox_relay (id, name, version) OVERRIDING SYSTEM VALUE VALUES (1, 'a', ''), (2, 'b', '');
		INSERT INTO outbox_relay_destination (relay_id, destination) VALUES (1, 'default'), (2, 'default')`)
	db.Exec(`UPDATE outbox_relay_destination SET refused_at = now() - interval '1 minute', refused_error = '403 Forbidden: no' WHERE relay_id = 2`)
	refused := func(what string, want ...string) {
		t.Helper()
		wantAdvice(db, want...)
		relays, err := New(db.Pool).Relays(t.Context())
		relaytest.Must(t, err)
		testkit.Equal(t, what, len(relays[1].RefusedBy) > 0, slices.ContainsFunc(want, func(s string) bool { return strings.HasPrefix(s, "Only relay b is refused") }))
	}
	const alone = `Only relay b is refused by "default": 403 Forbidden: no. The other relays deliver.`
	refused("alone", alone)
	db.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, http_status, destination, outcome, reason, error)
		VALUES (1, 1, now() - interval '2 minutes', 1, 1, 1, 403, 'default', 'retry', 'unauthorized', '403 Forbidden'), (1, 3, now(), 1, 2, 1, 404, 'default', 'retry', 'not_found', '404 Not Found')`)
	refused("the other one was refused before, or otherwise", alone)
	db.Exec(`INSERT INTO outbox_attempt (event_id, claim, started_at, duration_ms, attempt, relay_id, http_status, destination, outcome, reason, error)
		VALUES (1, 5, now(), 1, 3, 1, 403, 'default', 'retry', 'unauthorized', '403 Forbidden')`)
	refused("the other one is refused, too")
	db.Exec(`DELETE FROM outbox_attempt`)
	db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() - interval '1 minute' WHERE id = 1`)
	refused("the other one is dead")
	db.Exec(`UPDATE outbox_relay SET heartbeat_at = now() - interval '1 minute'`)
	refused("all are dead", "No relay is running, so nothing is sent.")
}

// wantAdvice checks what the status advises.
func wantAdvice(db *relaytest.Database, want ...string) {
	db.Helper()
	s, err := New(db.Pool).Status(db.Context(), "")
	relaytest.Must(db, err)
	var said []string
	for _, a := range s.Advice {
		said = append(said, a.Text)
	}
	testkit.Equal(db.TB, "advice", said, want)
}

// Status says nothing of an alert that its own figures contradict, though no relay has ended it.
func TestStatusLeavesOutAlertsThatAreOver(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Serve("default")
	db.Exec(`INSERT INTO outbox_alert (rule, subject, detail) VALUES ('lag', 'default', 'an hour'), ('waiting_keys', 'default', 'until then'), ('rescue_storm', current_database(), '3')`)
	db.Exec(`UPDATE outbox_watch SET watched_at = now() - interval '20 seconds', sample = '{"terms": {"lag_over": 600, "vacuum_blocked_over": 300}}'`)
	s, err := New(db.Pool).Status(t.Context(), "")
	relaytest.Must(t, err)
	if len(s.Alerts) > 0 || len(s.Advice) > 0 {
		t.Errorf("alerts %+v, advice %+v", s.Alerts, s.Advice)
	}

	// Also at once: a look waits for seconds before it ends this one.
	db.Exec(`INSERT INTO outbox_alert (rule, subject, detail) VALUES ('routes_changed', current_database(), 'added t to default')`)
	db.Exec(`INSERT INTO outbox_relay_route SELECT r.id, t.pattern, t.destination FROM outbox_relay r CROSS JOIN outbox_route t`)
	wantAdvice(db)
	db.Exec(`INSERT INTO outbox_route VALUES ('later', 'default')`)
	s, err = New(db.Pool).Status(t.Context(), "")
	relaytest.Must(t, err)
	if len(s.Advice) != 1 || s.Advice[0].Rule != alert.RuleRoutesChanged {
		t.Errorf("advice %+v", s.Advice)
	}
}
