package relay

import (
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// failing returns a relay's configuration whose destination refuses everything, told to the given channels.
func failing(t testing.TB, db *database, channels ...alert.Channel) Config {
	t.Helper()
	refusing := newReceiver(t, func(w http.ResponseWriter, r request) {
		w.WriteHeader(http.StatusUnprocessableEntity)
		_, _ = w.Write([]byte("<no> & " + r.key))
	})
	cfg := db.config(to(refusing.URL))
	cfg.Destinations[0].Wire.Excerpts = post.ExcerptsText
	cfg.Alerts.Channels = channels
	return cfg
}

// passWindow makes the alert window pass by moving what is stored into the past. It waits until nothing is being sent: what
// was claimed so long ago would be sent once more.
func (db *database) passWindow() {
	db.Helper()
	becomes(db, 0, `SELECT count(*) FROM outbox_alert_notice WHERE claimed_until > now()`)
	db.exec(`UPDATE outbox_alert SET opened_at = opened_at - interval '16 min', last_at = last_at - interval '16 min',
		due_at = due_at - interval '16 min', resolved_at = resolved_at - interval '16 min'`)
	db.exec(`UPDATE outbox_alert_notice SET notified_at = notified_at - interval '16 min'`)
}

// 501 failures are one message, and what is new after the window one more.
func TestFailuresAreToldOncePerWindow(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	slack := newReceiver(t, nil)
	db.insert(1, "first")
	r := start(t, failing(t, db, alert.Slack(slack.URL+"/services/T0/B0/secret", direct)))
	r.await(t, "the first message", func(o *observer) bool { return len(o.notices) == 1 })

	var message map[string]string
	must(t, json.Unmarshal(slack.all()[0].body, &message))
	for _, part := range []string{
		`1 delivery to "default" failed for good`, "event 1: 422 Unprocessable Entity: ‹no› &amp; first-1",
		"outbox-relay events list --status failed --destination default",
	} {
		if !strings.Contains(message["text"], part) {
			t.Errorf("%q is missing in %q", part, message["text"])
		}
	}

	const told = `SELECT count(*) FROM outbox_alert_notice WHERE count = $1 AND claimed_until IS NULL` // the log, too
	becomes(db, 2, told, 1)
	becomes(db, 1, `SELECT notified_count FROM outbox_alert`) // what comes now is news
	db.insert(500, "more")
	r.settles(t, policy.Fail, 501)
	becomes(db, 501, `SELECT count FROM outbox_alert`)
	must(t, r.alerter().SendDue(t.Context())) // as the alerter does after every failure, and at every tick
	must(t, r.alerter().SendDue(t.Context()))
	if got := row[int](db, `SELECT count FROM outbox_alert_notice WHERE channel <> 'log'`); got != 1 || slack.total() != 1 {
		t.Errorf("%d messages about %d failures within the window", slack.total(), got)
	}

	db.passWindow()
	r.await(t, "the second message", func(o *observer) bool { return len(o.notices) == 2 })
	if got := sees(r.observer, func(o *observer) alert.Alert { return o.notices[1].alert }); got.Count != 501 || got.Subject != "default" || got.FirstEventID < 2 {
		t.Errorf("second alert: %+v", got)
	}
	if slack.total() != 2 {
		t.Errorf("%d messages", slack.total())
	}
	// After a window without news the alert is closed, without a message, and the next failure opens a new one.
	becomes(db, 501, `SELECT notified_count FROM outbox_alert`)
	becomes(db, 2, told, 501)
	db.passWindow()
	becomes(db, 0, `SELECT count(*) FROM outbox_alert`)
	db.insert(1, "anew")
	r.await(t, "the alert about the new failure", func(o *observer) bool { return len(o.notices) == 3 })
	if got := sees(r.observer, func(o *observer) alert.Alert { return o.notices[2].alert }); got.Count != 1 {
		t.Errorf("third alert: %+v", got)
	}
}

func TestTwoRelaysTellOnce(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	g := newGate(t)
	slack := newReceiver(t, func(_ http.ResponseWriter, r request) { g.pass(r) })
	cfg := failing(t, db, alert.Slack(slack.URL, direct))
	a, b := start(t, cfg), start(t, cfg)
	a.instance()
	b.instance()
	db.insert(400, "key")
	becomes(db, 400, `SELECT count(*) FROM outbox_delivery WHERE status = 'failed'`)
	<-g.arrived // one of them is telling
	for _, r := range []*running{a, b} {
		must(t, r.alerter().SendDue(t.Context()))
	}
	g.open()
	becomes(db, true, `SELECT notified_count > 0 FROM outbox_alert`)
	for _, r := range []*running{a, b} { // and now it is told
		must(t, r.alerter().SendDue(t.Context()))
	}
	if slack.total() != 1 {
		t.Errorf("%d messages from two relays", slack.total())
	}
}

// A channel that is down gets the message later; one that works gets it once; deliveries do not notice.
func TestDeadChannelIsTriedAgainAndDelaysNothing(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t, "default", "healthy")
	healthy := newReceiver(t, nil)
	good := newReceiver(t, nil)
	hanging := newGate(t)
	broken := newReceiver(t, func(w http.ResponseWriter, r request) {
		if r.number == 1 {
			hanging.pass(r)
		}
		if r.number < 3 {
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = w.Write([]byte("no\x1b[31m"))
		}
	})
	cfg := failing(t, db, alert.Webhook(good.URL, direct), alert.Slack(broken.URL, direct))
	second := to(healthy.URL)
	second.Name = "healthy"
	cfg.Destinations = append(cfg.Destinations, second)
	cfg.Routes = []Route{{Event: "*", To: []string{"default", "healthy"}}}
	db.insert(1, "first")
	r := start(t, cfg)
	<-hanging.arrived // the alerter now waits for the channel
	db.insert(100, "more")
	r.settles(t, policy.Delivered, 101)
	r.settles(t, policy.Fail, 101)
	r.await(t, "the good channel's message", func(o *observer) bool { return len(o.notices) == 1 })
	hanging.open()

	for failures := 1; failures <= 2; failures++ {
		r.await(t, "the broken channel's error", func(o *observer) bool { return len(o.notices) == 1+failures })
		n := sees(r.observer, func(o *observer) notice { return o.notices[failures] })
		if n.err == nil || n.channel != alert.ChannelName("slack", broken.URL) || !strings.Contains(n.err.Error(), "500") || strings.Contains(n.err.Error(), "\x1b") {
			t.Errorf("%+v", n)
		}
		// The hold that keeps other relays away, and paces the attempts, ends.
		becomes(db, true, `SELECT claimed_until > now() + interval '20 s' FROM outbox_alert_notice WHERE channel = $1`, n.channel)
		db.exec(`UPDATE outbox_alert_notice SET claimed_until = now()`)
		db.exec(`UPDATE outbox_alert SET due_at = now()`)
	}
	r.await(t, "the broken channel's recovery", func(o *observer) bool { return len(o.notices) == 4 && o.notices[3].err == nil })
	if good.total() != 1 || broken.total() != 3 {
		t.Errorf("%d messages to the good channel and %d to the broken one", good.total(), broken.total())
	}
	var told map[string]any
	must(t, json.Unmarshal(good.all()[0].body, &told))
	if told["rule"] != "failed" || told["subject"] != "default" || told["first_event_id"] != "1" || told["command"] == "" || told["text"] == "" {
		t.Errorf("%v", told)
	}
}

// The URL of a channel is its secret.
func TestChannelsDoNotTellTheirURL(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"http://127.0.0.1:1/s3cret", "http://host.invalid/s3cret", "::s3cret", "http://[::1/s3cret", "gopher://x/s3cret", "http://a b/s3cret"} {
		for _, c := range []alert.Channel{alert.Slack(url, direct), alert.Webhook(url, direct)} {
			err := c.Notify(t.Context(), alert.Alert{Rule: "failed", Subject: "default", Count: 1, OpenedAt: time.Now()})
			if err == nil || strings.Contains(err.Error(), "s3cret") || strings.Contains(c.Name(), "s3cret") {
				t.Errorf("%s: %v", c.Name(), err)
			}
		}
	}
	slack, again := alert.Slack("a", direct).Name(), alert.Slack("a", direct).Name()
	if slack == alert.Slack("b", direct).Name() || slack == alert.Webhook("a", direct).Name() || slack != again {
		t.Error("names do not tell channels apart")
	}
}

// fire opens an alert as anybody would, and resolve ends it.
func (db *database) fire(rule string) {
	db.Helper()
	db.exec(`INSERT INTO outbox_alert AS a (rule, subject, detail) VALUES ($1, 's', 'detail')
		ON CONFLICT (rule, subject) DO UPDATE SET count = a.count + 1, last_at = now()`, rule)
}

func (db *database) resolve(rule string) {
	db.Helper()
	db.exec(`UPDATE outbox_alert SET resolved_at = now() WHERE rule = $1`, rule)
}

// pass moves what has been told, and what ended, into the past.
func (db *database) pass(t time.Duration) {
	db.Helper()
	db.exec(`UPDATE outbox_alert SET resolved_at = resolved_at - $1::interval`, t)
	db.exec(`UPDATE outbox_alert_notice SET notified_at = notified_at - $1::interval, claimed_until = claimed_until - $1::interval`, t)
}

// A condition that comes and goes is told when it fires, when it has ended for good, and then not again within the window.
func TestFlappingIsNoStorm(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	ops := &pager{name: "ops"}
	cfg := db.config(to("http://receiver.test/"))
	cfg.Alerts.Channels = []alert.Channel{ops}
	r := sessionOf(t, cfg)
	tell := func(want ...string) {
		t.Helper()
		must(t, r.alerter().SendDue(t.Context()))
		if got := ops.heard(); !slices.Equal(got, want) {
			t.Fatalf("told %q, want %q", got, want)
		}
	}
	const firing, resolved = "breaker_open firing", "breaker_open resolved"
	db.fire(alert.RuleBreakerOpen)
	tell(firing)
	for range 20 {
		db.resolve(alert.RuleBreakerOpen)
		tell(firing)
		db.fire(alert.RuleBreakerOpen)
		tell(firing)
	}
	db.resolve(alert.RuleBreakerOpen)
	db.pass(2 * time.Minute)
	tell(firing, resolved)
	if a := ops.last(); a.Count != 21 || !strings.HasPrefix(a.Text(), `Recovered: "s" accepts deliveries again`) {
		t.Errorf("%+v: %s", a, a.Text())
	}
	// It begins anew, but it has been told within the window.
	db.fire(alert.RuleBreakerOpen)
	tell(firing, resolved)
	db.pass(14 * time.Minute)
	tell(firing, firing, resolved)
	if a := ops.last(); a.Count != 1 || time.Since(a.OpenedAt) > 5*time.Minute {
		t.Errorf("a new episode says: %+v", a)
	}
	// What ends before anybody has been told is not told at all.
	db.fire(alert.RuleQuarantined)
	db.resolve(alert.RuleQuarantined)
	db.pass(2 * time.Minute)
	tell(firing, firing, resolved)
	becomes(db, 0, `SELECT count(*) FROM outbox_alert WHERE rule = 'quarantined'`)
}

// Many alerts are due, and one channel hangs on the first: the other one is told all of them, another relay does not tell
// the hanging one a second time, and who was told of the beginning hears the rest although the other never answers.
func TestHangingChannelHoldsUpOnlyItself(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
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
	cfg := db.config(to("http://receiver.test/"))
	cfg.Alerts.Channels = []alert.Channel{hanging, good}
	first, second := sessionOf(t, cfg), sessionOf(t, cfg)
	rules := []string{"rule-1", "rule-2", "rule-3", "rule-4", "rule-5"}
	for _, rule := range rules {
		db.fire(rule)
	}
	var telling sync.WaitGroup
	telling.Go(func() { _ = first.alerter().SendDue(t.Context()) })
	<-arrived
	eventually(t, "the good channel's alerts", func() bool { return len(good.heard()) == len(rules) })
	// The second relay goes on with the hanging channel's others, but not with the one that is under way, long as it takes.
	db.exec(`UPDATE outbox_alert_notice SET claimed_until = now() + interval '1 h' WHERE channel = 'hanging' AND claimed_until IS NOT NULL`)
	if notice, found, err := second.alerter().ClaimNotice(t.Context(), "hanging", time.Minute, true); err != nil || !found || notice.Rule == hanging.last().Rule {
		t.Errorf("claimed %q while it was being told: %v", notice.Rule, err)
	}
	for _, rule := range rules {
		db.fire(rule)
	}
	db.exec(`UPDATE outbox_alert_notice SET notified_at = notified_at - interval '16 min'`)
	must(t, second.alerter().SendTo(t.Context(), good.Name()))
	if got := good.last(); len(good.heard()) != 2*len(rules) || got.Count != 2 {
		t.Errorf("the good channel heard %q, last %+v", good.heard(), got)
	}
	let()
	telling.Wait()
}

// Whatever stands in an alert comes out as one line that mentions no person and runs nothing.
func TestTextsAreHarmless(t *testing.T) {
	t.Parallel()
	ended := time.Now()
	for _, rule := range append(alert.Rules(), alert.RuleTest, "new\nrule") {
		a := alert.Alert{Rule: rule, Subject: "x'; rm -rf\n/", Count: 2, OpenedAt: ended.Add(-12 * time.Minute), FirstEventID: 7, FirstError: "<!channel>\r\n\x1b[31m", Detail: "a\nb\u202e"}
		texts := []string{a.Text(), a.Title()}
		a.ResolvedAt = &ended
		texts = append(texts, a.Text())
		if !strings.Contains(a.Text(), "Recovered: ") || !strings.Contains(a.Text(), "lasted 12m") {
			t.Errorf("%s: %s", rule, a.Text())
		}
		for _, text := range texts {
			if strings.ContainsAny(text, "\n\r\x1b\u202e") {
				t.Errorf("%s: %q", rule, text)
			}
		}
	}
	received := newReceiver(t, nil)
	must(t, alert.Slack(received.URL, direct).Notify(t.Context(), alert.Alert{Rule: alert.RuleFailed, Subject: "d", FirstError: "<!channel> & co"}))
	if body := string(received.all()[0].body); strings.Contains(body, "<!channel>") || !strings.Contains(body, "amp;") {
		t.Errorf("%s", body)
	}
}

// Every rule has a place in the runbook.
func TestEveryRuleHasARunbook(t *testing.T) {
	t.Parallel()
	runbook, err := os.ReadFile("../docs/operations.md")
	must(t, err)
	for _, rule := range alert.Rules() {
		if !strings.Contains(string(runbook), "\n## Alert: "+rule+"\n") {
			t.Errorf("the runbook has no heading for %s", rule)
		}
	}
}

// A relay that is not sure where it is, as on a copy of its database, tells that and none of the alerts it found there.
func TestUncertainRelayTellsOnlyThat(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	ops := &pager{name: "ops"}
	cfg := db.config(to("http://receiver.test/"))
	cfg.Alerts.Channels = []alert.Channel{ops}
	r := sessionOf(t, cfg)
	instance, _ := r.current()
	db.fire(alert.RuleBreakerOpen)
	db.fire(alert.RuleQuarantined)
	r.presence.Set(instance, false)
	must(t, r.alerter().SendDue(t.Context()))
	if got := ops.heard(); !slices.Equal(got, []string{"quarantined firing"}) {
		t.Errorf("told %q", got)
	}
}

// Every death is remembered, whichever relay found it.
func TestDeathsAreCounted(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`INSERT INTO outbox_rescue (at, instance) VALUES (now() - interval '2 days', 99)`)
	db.dead()
	sessionOf(t, db.config(to("http://receiver.test/")))
	becomes(db, 1, `SELECT count(*) FROM outbox_rescue WHERE instance <> 99`)
	if n := row[int](db, `SELECT count(*) FROM outbox_rescue`); n != 1 {
		t.Errorf("%d deaths remembered", n)
	}
}
