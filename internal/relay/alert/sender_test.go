package alert_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

const firing, resolved = "breaker_open firing", "breaker_open resolved"

// 501 failures are one message with their number when it is sent, whichever of two relays sends it.
// What fails after a recovery that was sent is news at once; a recovery that was sent is forgotten.
func TestFailuresAreSentOnce(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	ops := &pager{name: "ops"}
	relays := []*alert.Sender{newSender(db, ops), newSender(db, ops)}
	fail := func(n int) {
		db.Exec(`INSERT INTO outbox_alert AS a (rule, subject, count) VALUES ('failed', 'default', $1)
			ON CONFLICT (rule, subject) DO UPDATE SET count = a.count + excluded.count, last_at = now()`, n)
	}
	sends := func(want ...string) {
		t.Helper()
		var passes sync.WaitGroup
		for _, s := range relays {
			passes.Go(func() {
				if err := s.SendDue(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		passes.Wait()
		var sent []string
		for _, a := range ops.all() {
			sent = append(sent, fmt.Sprint(a.State(), " ", a.Count))
		}
		if !slices.Equal(sent, want) {
			t.Fatalf("sent %q, want %q", sent, want)
		}
	}
	fail(1)
	fail(500)
	sends("firing 501")
	fail(1)
	sends("firing 501")
	pass(db, 61*time.Minute)
	sends("firing 501", "firing 502")
	if a := ops.last(); !a.Repeated || !strings.HasPrefix(a.Text(), "Still: 502 deliveries") {
		t.Errorf("%+v: %s", a, a.Text())
	}
	resolve(db, alert.RuleFailed)
	sends("firing 501", "firing 502", "resolved 502")
	fail(2)
	sends("firing 501", "firing 502", "resolved 502", "firing 2")
	resolve(db, alert.RuleFailed)
	sends("firing 501", "firing 502", "resolved 502", "firing 2", "resolved 2")
	pass(db, 6*time.Minute)
	sends("firing 501", "firing 502", "resolved 502", "firing 2", "resolved 2")
	testkit.Equal(t, "the alert is not forgotten", relaytest.Row[int](db, `SELECT count(*) FROM outbox_alert`), 0)
}

// The alert of a failure says that a 410 has paused the destination, and its end what waits.
func TestFailureOfAPausedDestination(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	ops := &pager{name: "ops"}
	s := newSender(db, ops)
	db.Exec(`INSERT INTO outbox_destination (destination, paused, paused_at) VALUES ('default', true, now())
		ON CONFLICT (destination) DO UPDATE SET paused = true, paused_at = now()`)
	db.Exec(`INSERT INTO outbox_alert (rule, subject, first_error) VALUES ('failed', 'default', '410 Gone')`)
	relaytest.Must(t, s.SendDue(t.Context()))
	if text := ops.last().Text(); !strings.Contains(text, "is resumed: outbox-relay resume default.") {
		t.Errorf("the alert says %q", text)
	}
	db.Insert(3, "k")
	resolve(db, alert.RuleFailed)
	pass(db, time.Minute)
	relaytest.Must(t, s.SendDue(t.Context()))
	if text := ops.last().Text(); !strings.Contains(text, "; the destination is paused, with 3 pending.") {
		t.Errorf("its end says %q", text)
	}
}

// What is due later is asked for later, and each number is that of the moment of sending.
func TestNumbersAreThoseOfTheMoment(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	ops := &pager{name: "ops"}
	s := newSender(db, ops)
	cfg := alert.Config{Channels: []alert.Channel{ops}, PublicURL: "https://relay.internal/outbox"}.WithDefaults()
	s.Config, s.Environment, s.Relay = func() alert.Config { return cfg }, "production", "relay-1"
	refreshed := 0
	s.Refresh = func(context.Context) error { refreshed++; return nil }
	db.Exec(`INSERT INTO outbox_alert (rule, subject, first_error, detail) VALUES ('breaker_open', 'default', 'dial tcp: connection refused', '1 pending delivery')`)
	db.Exec(`INSERT INTO outbox_destination (destination, breaker, breaker_opened_at, breaker_until, breaker_error) VALUES ('default', 'open', now(), now(), '401 Unauthorized')
		ON CONFLICT (destination) DO UPDATE SET breaker = 'open', breaker_opened_at = now(), breaker_until = now(), breaker_error = excluded.breaker_error`)
	relaytest.Must(t, s.SendDue(t.Context()))
	if n := relaytest.Row[int](db, `SELECT count(*) FROM outbox_alert WHERE due_at BETWEEN now() + interval '30 s' AND now() + interval '45 s'`); n != 1 || refreshed != 0 || len(ops.all()) != 0 {
		t.Errorf("the alert is not put off; refreshed %d times, sent %d", refreshed, len(ops.all()))
	}
	db.Insert(83, "k")
	pass(db, 46*time.Second)
	relaytest.Must(t, s.SendDue(t.Context()))
	if n := len(ops.all()); n != 1 || refreshed == 0 {
		t.Fatalf("sent %d, refreshed %d times", n, refreshed)
	}
	database := relaytest.Row[string](db, `SELECT current_database()`)
	text := ops.last().Text()
	for _, part := range []string{
		`"default" refuses the relay's credentials or signature, and its deliveries are held (83 pending). Latest error: 401 Unauthorized. Since 20`,
		"Make destinations.default.signing_secrets (or its credentials) those of the receiver",
		`Database "` + database + `", environment "production", relay "relay-1". Page: https://relay.internal/outbox/alerts Runbook: https://`, "operations.md#alert-breaker_open",
	} {
		if !strings.Contains(text, part) {
			t.Errorf("%q is missing in %s", part, text)
		}
	}
	// Whether a relay tries it, in every state.
	for _, state := range []struct{ change, says string }{
		{`SELECT 1`, "no running relay has it, so that none tries it"},
		{`WITH r AS (INSERT INTO outbox_relay (name, version) VALUES ('r', '') RETURNING id) INSERT INTO outbox_relay_destination SELECT id, 'default' FROM r`, "a relay tries it every few seconds, with what is due"},
		{`UPDATE outbox_relay SET heartbeat_at = now() - interval '1 minute'`, "no running relay has it, so that none tries it"},
		{`UPDATE outbox_destination SET paused = true, paused_at = now()`, "it is paused, and no relay tries it before it is resumed"},
	} {
		db.Exec(state.change)
		open, err := alert.Open(t.Context(), db.Pool)
		relaytest.Must(t, err)
		if remedy := open[0].Remedy(strings.TrimSpace); !strings.HasPrefix(remedy, "Nothing is lost: "+state.says+". Make ") {
			t.Errorf("after %s: %s", state.change, remedy)
		}
	}
}

// A relay dies after it has claimed an alert. Another one sends it when the claim has ended, and
// not before; if the condition has ended by then, its end, as the channel may have got the
// beginning.
func TestRelayThatDiedWhileItSent(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	ops := &pager{name: "ops"}
	s := newSender(db, ops)
	for _, rule := range []string{alert.RuleBreakerOpen, alert.RuleParked} {
		fire(db, rule)
	}
	db.Exec(`INSERT INTO outbox_alert_notice (rule, subject, channel, claimed_until) SELECT rule, subject, 'ops', now() + interval '45 s' FROM outbox_alert`)
	relaytest.Must(t, s.SendDue(t.Context()))
	if got := ops.heard(); len(got) != 0 {
		t.Fatalf("sent %q while another relay did", got)
	}
	resolve(db, alert.RuleParked)
	pass(db, 46*time.Second)
	relaytest.Must(t, s.SendDue(t.Context()))
	testkit.Equal(t, "sent", ops.heard(), []string{firing, "parked resolved"})
}

// While one relay sends an alert, no other one does.
func TestTwoRelaysSendOnce(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	arrived, release := make(chan struct{}), make(chan struct{})
	slow := &pager{name: "slow", answer: func(int) error {
		arrived <- struct{}{}
		<-release
		return nil
	}}
	first, second := newSender(db, slow), newSender(db, slow)
	fire(db, alert.RuleBreakerOpen)
	var sending sync.WaitGroup
	sending.Go(func() {
		if err := first.SendDue(t.Context()); err != nil {
			t.Error(err)
		}
	})
	<-arrived
	relaytest.Must(t, second.SendDue(t.Context()))
	close(release)
	sending.Wait()
	for _, s := range []*alert.Sender{first, second} {
		relaytest.Must(t, s.SendDue(t.Context()))
	}
	testkit.Equal(t, "sent", slow.heard(), []string{firing})
}

// A channel that is down gets the alert later, and one that works gets it once, by a sender that
// runs.
func TestDeadChannelIsTriedAgain(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	hanging := make(chan struct{})
	good := &pager{name: "good"}
	broken := &pager{name: "broken", answer: func(n int) error {
		switch n {
		case 1:
			<-hanging
			fallthrough
		case 2:
			return errors.New("500")
		}
		return nil
	}}
	type notice struct {
		channel string
		err     error
	}
	notices, due := make(chan notice, 10), make(chan struct{}, 1)
	s := newSender(db, good, broken)
	s.Due = due
	s.Notified = func(channel string, a alert.Alert, err error) { notices <- notice{channel, err} }
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	running.Go(func() { s.Run(ctx) })

	fire(db, alert.RuleBreakerOpen)
	due <- struct{}{}
	if n := <-notices; n.channel != "good" || n.err != nil {
		t.Errorf("%+v", n)
	}
	close(hanging)
	for range 2 {
		if n := <-notices; n.channel != "broken" || n.err == nil {
			t.Errorf("%+v", n)
		}
		// The hold that keeps other relays away also delays the next attempt.
		if n := db.Exec(`UPDATE outbox_alert_notice SET claimed_until = now() WHERE channel = 'broken' AND claimed_until > now() + interval '20 s'`); n != 1 {
			t.Error("the next attempt is not delayed")
		}
		db.Exec(`UPDATE outbox_alert SET due_at = now()`)
		due <- struct{}{}
	}
	if n := <-notices; n.channel != "broken" || n.err != nil {
		t.Errorf("%+v", n)
	}
	if len(good.all()) != 1 || len(broken.all()) != 3 {
		t.Errorf("%d alerts were sent to the good channel and %d to the broken one", len(good.all()), len(broken.all()))
	}
}

// A condition that comes and goes is sent three times, then once as one that flaps, and its end
// when it has been gone for five minutes.
func TestFlappingIsOneAlert(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	ops := &pager{name: "ops"}
	s := newSender(db, ops)
	send := func(want int) alert.Alert {
		t.Helper()
		relaytest.Must(t, s.SendDue(t.Context()))
		if got := ops.heard(); len(got) != want {
			t.Fatalf("sent %q, want %d", got, want)
		}
		return ops.last()
	}
	for i := range 3 {
		fire(db, alert.RuleBreakerOpen)
		send(2*i + 1)
		resolve(db, alert.RuleBreakerOpen)
		send(2*i + 2)
	}
	for range 20 {
		fire(db, alert.RuleBreakerOpen)
		send(7)
		resolve(db, alert.RuleBreakerOpen)
		send(7)
	}
	if a := ops.last(); !a.Flaps() || !strings.Contains(a.Text(), "It comes and goes: it has returned 3 times since 20") {
		t.Errorf("%+v: %s", a, a.Text())
	}
	pass(db, 6*time.Minute)
	if a := send(8); a.ResolvedAt == nil || !strings.HasPrefix(a.Text(), `Recovered: deliveries to "s" are no longer held: detail. `) || !strings.Contains(a.Text(), "It had returned 22 times since") {
		t.Errorf("%+v: %s", a, a.Text())
	}
	// What ends before it was sent is not sent at all.
	s.Config = func() alert.Config { return alert.Config{Channels: []alert.Channel{ops}}.WithDefaults() }
	fire(db, alert.RuleParked)
	send(8)
	resolve(db, alert.RuleParked)
	pass(db, 6*time.Minute)
	send(8)
	testkit.Equal(t, "an alert that nobody needs is kept", relaytest.Row[int](db, `SELECT count(*) FROM outbox_alert`), 0)
}

// Many alerts are due, and one channel hangs on the first. The other channel gets all of them, and
// what follows. Another relay does not send the one that hangs a second time.
func TestHangingChannelHoldsUpOnlyItself(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	release := make(chan struct{})
	let := sync.OnceFunc(func() { close(release) })
	t.Cleanup(let)
	arrived := make(chan struct{}, 100)
	hanging := &pager{name: "hanging", answer: func(int) error {
		arrived <- struct{}{}
		<-release
		return errors.New("went away")
	}}
	good := &pager{name: "good"}
	first, second := newSender(db, hanging, good), newSender(db, hanging, good)
	recorded := make(chan error, 100)
	for _, s := range []*alert.Sender{first, second} {
		s.Notified = func(channel string, _ alert.Alert, err error) {
			if channel == good.Name() {
				recorded <- err
			}
		}
	}
	rules := []string{"rule-1", "rule-2", "rule-3", "rule-4", "rule-5"}
	fireAll := func() {
		t.Helper()
		for _, rule := range rules {
			fire(db, rule)
		}
	}
	await := func() { // until the database knows that the good channel has them
		t.Helper()
		for range rules {
			relaytest.Must(t, <-recorded)
		}
	}
	fireAll()
	var sending sync.WaitGroup
	sending.Go(func() { _ = first.SendDue(t.Context()) })
	<-arrived
	await()
	// No other relay sends what is being sent, long as it takes.
	db.Exec(`UPDATE outbox_alert_notice SET claimed_until = now() + interval '1 h' WHERE channel = 'hanging' AND claimed_until IS NOT NULL`)
	fireAll()
	db.Exec(`UPDATE outbox_alert_notice SET sent_at = sent_at - interval '61 min'`)
	db.Exec(`UPDATE outbox_alert SET due_at = now()`)
	relaytest.Must(t, second.SendTo(t.Context(), good.Name()))
	await() // the first relay's pass may have sent some of them
	for _, a := range good.all()[len(rules):] {
		if a.Count != 2 {
			t.Errorf("the good channel heard %+v", a)
		}
	}
	let()
	sending.Wait()
	if n := len(good.all()); n != 2*len(rules) {
		t.Errorf("the good channel got %d alerts", n)
	}
}

// Two relays want to send the same alert. The one that comes too late continues with the others
// that are due.
func TestLostRaceEndsNoPass(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	ops := &pager{name: "ops"}
	s := newSender(db, ops)
	for _, rule := range []string{"rule-1", "rule-2", "rule-3"} {
		fire(db, rule)
	}
	other := db.Begin()
	_, err := other.Exec(t.Context(), `INSERT INTO outbox_alert_notice (rule, subject, channel, claimed_until) VALUES ('rule-1', 's', 'ops', now() + interval '45 s')`)
	relaytest.Must(t, err)
	sent := make(chan error, 1)
	go func() { sent <- s.SendTo(t.Context(), "ops") }()
	relaytest.Becomes(db, 1, `SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`)
	relaytest.Must(t, other.Commit(t.Context()))
	relaytest.Must(t, <-sent)
	testkit.Equal(t, "sent", ops.heard(), []string{"rule-2 firing", "rule-3 firing"})
}

// A relay that is not sure where it is, as on a copy of its database, sends that and none of the
// alerts that it found there.
func TestUncertainRelaySendsOnlyThat(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	ops := &pager{name: "ops"}
	s := newSender(db, ops)
	unguarded := false
	s.Alive = func() bool { return false }
	s.Always = func(ctx context.Context) context.Context { unguarded = true; return ctx }
	fire(db, alert.RuleBreakerOpen)
	fire(db, alert.RuleQuarantined)
	relaytest.Must(t, s.SendTo(t.Context(), "ops"))
	if got := ops.heard(); !unguarded || !slices.Equal(got, []string{"quarantined firing"}) {
		t.Errorf("sent %q", got)
	}
}

// An alert that has ended is listed with the channels that were sent it, and its end.
func TestEndedAlertsAreListed(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	s := newSender(db, &pager{name: "ops"})
	fire(db, alert.RuleBreakerOpen)
	db.Exec(`INSERT INTO outbox_alert_past (rule, subject, began_at, resolved_at, returned, count, notices) VALUES ('lag', 'old', now(), now() - interval '15 days', 0, 1, '[]')`)
	for _, ends := range []func(){func() {}, func() { resolve(db, alert.RuleBreakerOpen) }, func() {}} {
		ends()
		pass(db, 20*time.Minute)
		for range 3 {
			relaytest.Must(t, s.SendDue(t.Context()))
		}
	}
	ended, err := alert.Ended(t.Context(), db.Pool)
	relaytest.Must(t, err)
	if len(ended) != 1 || ended[0].Rule != alert.RuleBreakerOpen || len(ended[0].Notices) != 2 || ended[0].Notices[1].Channel != "ops" || ended[0].Notices[1].SentAt == nil || ended[0].Notices[1].EndedAt == nil {
		t.Errorf("%+v", ended)
	}

	// One that may return is listed at once, and no longer when it has.
	fire(db, alert.RuleLag)
	for _, step := range []struct {
		change func(*relaytest.Database, string)
		ended  int
	}{{resolve, 2}, {fire, 1}} {
		step.change(db, alert.RuleLag)
		ended, err = alert.Ended(t.Context(), db.Pool)
		relaytest.Must(t, err)
		if len(ended) != step.ended || (ended[0].Rule == alert.RuleLag) != (step.ended == 2) {
			t.Errorf("want %d: %+v", step.ended, ended)
		}
	}
}

// An alert that has returned is listed with the times of its last incident, which is the one that
// its text names.
func TestEndedAlertShowsOneIncident(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	s := newSender(db, &pager{name: "ops"})
	step := func(change func(*relaytest.Database, string)) {
		t.Helper()
		change(db, alert.RuleBreakerOpen)
		relaytest.Must(t, s.SendDue(t.Context()))
	}
	step(fire)
	step(resolve)
	const sent = `SELECT ended_sent_at FROM outbox_alert_notice WHERE channel = 'ops'`
	first := relaytest.Row[time.Time](db, sent)
	step(fire)
	if ended := relaytest.Row[*time.Time](db, sent); ended != nil {
		t.Errorf("the end of what lasts was sent at %s", ended)
	}
	step(resolve)
	check := func() {
		t.Helper()
		ended, err := alert.Ended(t.Context(), db.Pool)
		relaytest.Must(t, err)
		if len(ended) != 1 || ended[0].Returned != 1 {
			t.Fatalf("%+v", ended)
		}
		if a := ended[0]; a.BeganAt.Before(first) || len(a.Notices) != 2 || a.Notices[1].SentAt.Before(first) || a.Notices[1].EndedAt.Before(*a.Notices[1].SentAt) {
			t.Errorf("the first incident's end was sent at %s: %+v", first, a)
		}
	}
	check()
	db.Exec(`UPDATE outbox_alert SET resolved_at = resolved_at - interval '6 minutes', due_at = now()`)
	relaytest.Must(t, s.SendDue(t.Context()))
	testkit.Equal(t, "alerts", relaytest.Row[int](db, `SELECT count(*) FROM outbox_alert`), 0)
	check()
}
