package relay

import (
	"cmp"
	"encoding/base64"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/archive"
	"github.com/outbox-relay/outbox-relay/relay/kafkapost"
	"github.com/outbox-relay/outbox-relay/relay/natspost"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// reload puts a configuration into effect that must be fit for it.
func (r *running) reload(cfg Config) []string {
	r.t.Helper()
	changes, err := r.Reload(cfg)
	must(r.t, err)
	return changes
}

func named(name string, d post.Destination) post.Destination {
	d.Name = name
	return d
}

// What is on its way ends where it began; what follows goes to the new place, with the new secret.
func TestReloadChangesADestination(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	g := newGate(t)
	before := newReceiver(t, func(_ http.ResponseWriter, r request) { g.pass(r) })
	after := newReceiver(t, nil)
	d := to(before.URL + "/in?token=hunter2")
	d.SigningSecrets = []webhook.Secret{signingSecret(t, 1)}
	r := start(t, db.config(d))
	db.insert(1, "first")
	<-g.arrived

	d.URL, d.SigningSecrets, d.Timeout = after.URL+"/in?token=hunter3", []webhook.Secret{signingSecret(t, 2)}, 7*time.Second
	if got, want := r.reload(db.config(d)), "[destinations.default changed: url, timeout, signing_secrets]"; fmt.Sprint(got) != want {
		t.Errorf("changes are %s, want %s", got, want)
	}
	db.insert(1, "second")
	r.settles(t, policy.Delivered, 1)
	g.open()
	r.settles(t, policy.Delivered, 2)
	if !slices.Equal(before.keys(), []string{"first-1"}) || !slices.Equal(after.keys(), []string{"second-1"}) {
		t.Errorf("the old place got %v, the new one %v", before.keys(), after.keys())
	}
	if before.all()[0].signature() == "" || before.all()[0].signature() == after.all()[0].signature() {
		t.Error("the secret is not the new one")
	}
	if got := r.reload(db.config(d)); got != nil {
		t.Errorf("the same configuration changes %v", got)
	}
}

// signingSecret returns one of many.
func signingSecret(t *testing.T, n int) webhook.Secret {
	t.Helper()
	return secret(t, "whsec_"+base64.StdEncoding.EncodeToString(fmt.Appendf(nil, "%032d", n)))
}

func (r request) signature() string { return r.header.Get("Webhook-Signature") }

// A destination comes and goes with its routes. What waits for it is unserved until it comes back.
func TestReloadAddsAndRemovesDestinations(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc, other := newReceiver(t, nil), newReceiver(t, nil)
	g := newGate(t)
	slow := newReceiver(t, func(_ http.ResponseWriter, r request) { g.pass(r) })
	with := func(change func(*Config)) Config {
		cfg := db.config(to(rc.URL), named("other", to(other.URL)), named("slow", post.Destination{URL: slow.URL, MaxInFlight: 1, Timeout: 50 * time.Second}))
		change(&cfg)
		return cfg
	}
	all := func(*Config) {}
	alone := func(cfg *Config) { cfg.Destinations = cfg.Destinations[:1] }
	r := start(t, with(alone))
	db.insert(1, "one")
	r.settles(t, policy.Delivered, 1)

	if got, want := r.reload(with(all)), "[destinations.other added destinations.slow added routes: 2 added, 0 removed]"; fmt.Sprint(got) != want {
		t.Errorf("changes are %s, want %s", got, want)
	}
	db.insert(3, "all")
	<-g.arrived
	r.settles(t, policy.Delivered, 7)

	// One delivery is on its way to slow, and ends; the two that are queued behind it are given back, and wait.
	r.reload(with(alone))
	r.await(t, "what was queued", func(o *observer) bool { return o.reasons[policy.ReasonRemoved] == 1 })
	becomes(db, 2, "SELECT count(*)::int FROM outbox_delivery WHERE status = 'pending' AND claimed_by IS NULL AND destination = 'slow'")
	g.open()
	r.settles(t, policy.Delivered, 8)
	db.insert(1, "afterwards")
	r.settles(t, policy.Delivered, 9)
	if other.total() != 3 || slow.total() != 1 {
		t.Errorf("other got %v, slow %v", other.keys(), slow.keys())
	}

	// And back again.
	r.reload(with(all))
	r.settles(t, policy.Delivered, 11)
	if slow.total() != 3 {
		t.Errorf("slow got %v", slow.keys())
	}
}

// A route that was missing needs no restart: what is parked goes out.
func TestReloadReleasesWhatIsParked(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	cfg := db.config(to(newReceiver(t, nil).URL))
	cfg.Routes = []Route{{Event: "other", To: []string{"default"}}}
	r := start(t, cfg)
	db.insert(1, "early")
	cfg.Routes = []Route{{Event: "other", To: []string{"default"}}, {Event: "t", To: []string{"default"}}}
	if got, want := r.reload(cfg), "[routes: 1 added, 0 removed]"; fmt.Sprint(got) != want {
		t.Errorf("changes are %s, want %s", got, want)
	}
	r.settles(t, policy.Delivered, 1)
}

// Reloads race with each other, with deliveries and with everything else that reads the configuration. Each event still
// arrives once, at one of the places.
func TestReloadUnderLoad(t *testing.T) {
	t.Parallel()
	testsize.Long(t)
	db := newDatabase(t)
	places := []*receiver{newReceiver(t, nil), newReceiver(t, nil), newReceiver(t, nil)}
	variant := func(n int) Config {
		d := to(places[n%3].URL)
		d.MaxInFlight, d.RateLimit = 4+n%7, float64(n%2)*10_000
		d.SigningSecrets = []webhook.Secret{signingSecret(t, n%4)}
		d.Breaker.Off, d.OnFailure = n%3 == 0, map[bool]policy.FailurePolicy{true: policy.SkipFailed, false: policy.BlockFailed}[n%2 == 0]
		cfg := db.config(d)
		cfg.LogDelivered, cfg.MaxInFlight, cfg.Alerts.Window = n%2 == 0, 8+n, time.Duration(n+1)*time.Minute
		cfg.Retention.ArchiveAfter = time.Duration(n) * days
		cfg.Routes = []Route{{Event: "*", To: []string{"default"}}, {Event: fmt.Sprint("never.", n), To: []string{"default"}}}
		return cfg
	}
	r := start(t, variant(0))
	r.instance()
	var writing, reloading sync.WaitGroup
	events := testsize.Of(3000, 1000)
	writing.Go(func() {
		for i := range events / 100 {
			db.insert(100, fmt.Sprint("batch-", i))
		}
	})
	for worker := range 3 {
		reloading.Go(func() {
			for n := range 20 {
				if _, err := r.Reload(variant(worker*20 + n + 1)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	writing.Wait()
	reloading.Wait()
	r.settles(t, policy.Delivered, events)
	seen := map[string]int{}
	for _, place := range places {
		for _, r := range place.all() {
			seen[r.key]++
			if r.signature() == "" {
				t.Errorf("%s is not signed", r.key)
			}
		}
	}
	twice := slices.Collect(maps.Keys(seen))
	twice = slices.DeleteFunc(twice, func(key string) bool { return seen[key] == 1 })
	if len(seen) != events || len(twice) > 0 {
		t.Errorf("%d of %d events arrived, %d more than once", len(seen), events, len(twice))
	}
	if got, want := db.storedRoutes(), routesOfConfig(*r.config()); got != want {
		t.Errorf("the stored routes are %s, those in effect %s", got, want)
	}
}

// What needs a restart is named and stays, the rest is in effect; together they still have to make sense.
func TestReloadOfWhatNeedsARestart(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	var hooked []string
	cfg := db.config(to(rc.URL))
	cfg.Hooks.Reloaded = func(changes []string, err error) { hooked = append(hooked, fmt.Sprint(changes, err)) }
	r := start(t, cfg)
	cfg = db.config(to(rc.URL))
	cfg.Pool.ConnConfig.Password = "other"
	cfg.Pool = settings(t, strings.Replace(db.dsn, "?", "?connect_timeout=7&", 1))
	cfg.Name, cfg.Lease, cfg.PollInterval, cfg.Environment, cfg.Schema = "renamed", time.Hour, time.Minute, "moon", "public"
	cfg.Pooler.Mode, cfg.Pooler.Session, cfg.Watching.Interval, cfg.DrainTimeout = PoolerNone, settings(t, db.dsn), time.Minute, time.Second
	want := []string{
		"relay.drain_timeout", "database.url", "database.pooler", "database.listen_url", "database.schema", "environment",
		"relay.name", "relay.poll_interval", "relay.lease", "watching",
	}
	if got := r.reload(cfg); !slices.Equal(got, want) {
		t.Errorf("changes are %v, want %v", got, want)
	}
	if r.cfg.Name != "test" || r.config().Name != "test" || r.config().Lease != DefaultLease || r.config().DrainTimeout != time.Second {
		t.Errorf("in effect is %+v", r.config())
	}

	before := r.config().Destinations[0].Timeout
	cfg.Destinations[0].Timeout = 10 * time.Minute // fits the lease that it came with
	_, err := r.Reload(cfg)
	if err == nil || !strings.HasPrefix(err.Error(), "with database.url and ") ||
		!strings.HasSuffix(err.Error(), "which stays what it is until a restart: relay.lease: 1m0s must be at least 5s longer than destinations.default.timeout (10m0s); write 10m5s or more, or lower the timeout") {
		t.Errorf("the error is %v", err)
	}
	if r.config().Destinations[0].Timeout != before {
		t.Error("a reload that failed changed something")
	}
	if _, err := r.Reload(Config{}); err == nil || !strings.HasPrefix(err.Error(), "database.url: is not set\ndestinations: there is none") {
		t.Errorf("the error is %v", err)
	}
	r.stop()
	if _, err := r.Reload(cfg); err == nil || err.Error() != "the relay is stopping; its configuration stays as it is" {
		t.Errorf("the error after the end is %v", err)
	}
	if len(hooked) != 4 || hooked[0] != fmt.Sprint(want, error(nil)) {
		t.Errorf("the hook was told %q", hooked)
	}
}

// Before the database has answered, and while it is away, a configuration takes effect; its routes follow when it is
// back.
func TestReloadWithoutADatabase(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	link := newLink(t, db.dsn)
	link.block(true)
	rc := newReceiver(t, nil)
	cfg := db.config(to("http://receiver.invalid"), named("never", to("http://receiver.invalid")))
	cfg.Pool = settings(t, link.dsn)
	r := start(t, cfg)
	r.await(t, "a failure", func(o *observer) bool { return o.failures["prepare"] > 0 })

	cfg.Destinations = []post.Destination{to(rc.URL), named("second", to(rc.URL))}
	cfg.Routes = []Route{{Event: "t", To: []string{"default"}}}
	r.reload(cfg)
	link.block(false)
	r.instance()
	db.insert(1, "one")
	r.settles(t, policy.Delivered, 1)

	link.block(true)
	link.cut()
	eventually(t, "the end of the session", func() bool { _, alive := r.current(); return !alive })
	cfg.Destinations = cfg.Destinations[:1]
	cfg.Routes = []Route{{Event: "t*", To: []string{"default"}}}
	r.reload(cfg)
	link.block(false)
	becomes(db, "t*", "SELECT pattern FROM outbox_route")
	db.insert(1, "two")
	r.settles(t, policy.Delivered, 2)
}

// A reload undoes what was done to the stored routes by hand, also when the configuration is the same.
func TestReloadRestoresRoutes(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := newDatabase(t)
	r := prepared(t, db.config(to("http://receiver.invalid")))
	r.wake.routes = nil // the relay follows the stored routes by itself, too
	r.begin()
	r.instance()
	db.exec("DELETE FROM outbox_route; INSERT INTO outbox_route (pattern, destination) VALUES ('by.hand', 'default')")
	cfg := db.config(to("http://receiver.invalid"))
	if got := fmt.Sprint(r.reload(cfg)); got != "[routes: 1 restored]" {
		t.Errorf("changes are %s", got)
	}
	if got := db.storedRoutes(); got != "* default" {
		t.Errorf("the routes are %s", got)
	}
	if got := r.reload(cfg); got != nil {
		t.Errorf("the same configuration changes %v", got)
	}
	cfg.Routes = nil
	for i := range 10_000 {
		cfg.Routes = append(cfg.Routes, Route{Event: fmt.Sprint("event.", i), To: []string{"default"}})
	}
	if got := fmt.Sprint(r.reload(cfg)); got != "[routes: 10000 added, 1 removed]" {
		t.Errorf("changes are %s", got)
	}
	if n := row[int](db, "SELECT count(*) FROM outbox_route"); n != 10_000 {
		t.Errorf("%d routes", n)
	}
}

// Alert channels come and go; what is open is told to those there are.
func TestReloadOfAlertChannels(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	first, second := newReceiver(t, nil), newReceiver(t, nil)
	cfg := failing(t, db, alert.Webhook(first.URL, direct))
	r := start(t, cfg)
	db.insert(1, "one")
	r.await(t, "the first message", func(o *observer) bool { return len(o.notices) == 1 })
	cfg.Alerts.Channels = []alert.Channel{alert.Webhook(second.URL, direct)}
	if got := fmt.Sprint(r.reload(cfg)); got != "[alerts.channels]" {
		t.Errorf("changes are %s", got)
	}
	db.passWindow()
	db.insert(1, "two")
	r.await(t, "the second message", func(o *observer) bool { return len(o.notices) == 2 })
	if first.total() != 1 || second.total() != 1 {
		t.Errorf("%d messages to the channel that was removed, %d to the new one", first.total(), second.total())
	}
}

// Retention follows, and a run under way ends, since it removes what is to be kept now.
func TestReloadOfRetention(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	cfg := db.config(to("http://receiver.invalid"))
	r := prepared(t, cfg)
	jobs := newJobs(r.cfg.Log)
	plan := archive.Schedule{Jobs: jobs, Run: r.archive}
	schedules := func(keep archive.Retention) int {
		cfg.Retention = keep
		r.reload(cfg)
		plan.Follow(t.Context(), r.config().Retention)
		return len(jobs.Entries())
	}
	if n := schedules(archive.Retention{ArchiveAfter: days}); n != 1 {
		t.Errorf("%d runs are planned, want 1", n)
	}
	first := jobs.Entries()[0].ID
	if schedules(archive.Retention{ArchiveAfter: days}); jobs.Entries()[0].ID != first {
		t.Error("planned anew although nothing changed")
	}
	if schedules(archive.Retention{ArchiveAfter: 2 * days}); len(jobs.Entries()) != 1 || jobs.Entries()[0].ID == first {
		t.Error("not planned anew")
	}
	if n := schedules(archive.Retention{}); n != 0 {
		t.Errorf("%d runs are planned, want none", n)
	}
}

// A breaker that is switched off lets go what it holds.
func TestReloadSwitchesABreakerOff(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, status(http.StatusServiceUnavailable))
	d := to(rc.URL)
	d.Breaker = policy.BreakerPolicy{Failures: 1, ProbeAfter: time.Second, ProbeMax: time.Second}
	d.Retry.MaxAttempts = 3
	r := start(t, db.config(d))
	db.insert(5, "one")
	becomes(db, 1, "SELECT count(*)::int FROM outbox_destination WHERE breaker = 'open'")
	d.Breaker.Off = true
	if got := fmt.Sprint(r.reload(db.config(d))); got != "[destinations.default changed: breaker]" {
		t.Errorf("changes are %s", got)
	}
	r.settles(t, policy.Fail, 5)
	becomes(db, 0, "SELECT count(*)::int FROM outbox_destination WHERE breaker <> 'closed'")
}

// Each setting of a configuration either makes a difference, or stays, or is part of what is compared otherwise.
func TestEverySettingMakesADifference(t *testing.T) {
	t.Parallel()
	d := post.Destination{Name: "a", URL: "http://a"}
	complete := func(change func(*Config)) *Config {
		cfg := Config{Destinations: []post.Destination{d}}
		change(&cfg)
		cfg = cfg.withDefaults()
		return &cfg
	}
	base := complete(func(*Config) {})
	half := 0.5
	for name, change := range map[string]func(*Config){
		"Destinations":  func(c *Config) { c.Destinations[0].URL = "http://b" },
		"Routes":        func(c *Config) { c.Routes = []Route{{Event: "x", To: []string{"a"}}} },
		"Egress":        func(c *Config) { c.Egress.AllowPrivate = []netip.Prefix{} },
		"Egress.Proxy":  func(c *Config) { c.Egress.Proxy = "http://p:1" },
		"Alerts":        func(c *Config) { c.Alerts.Channels = []alert.Channel{alert.Slack("http://s", direct)} },
		"Alerts.Window": func(c *Config) { c.Alerts.Window = time.Hour },
		"Alerts.Lag":    func(c *Config) { c.Alerts.LagOver = time.Hour },
		"Alerts.Pinned": func(c *Config) { c.Alerts.VacuumBlockedOver = time.Hour },
		"Retention":     func(c *Config) { c.Retention.ArchiveAfter = days },
		"DrainTimeout":  func(c *Config) { c.DrainTimeout = time.Hour },
		"MaxInFlight":   func(c *Config) { c.MaxInFlight = 7 },
		"LogDelivered":  func(c *Config) { c.LogDelivered = true },
		"Retry":         func(c *Config) { c.Destinations[0].Retry.Jitter = &half },
	} {
		if got := base.differences(complete(change)); len(got) != 1 {
			t.Errorf("%s: %q", name, got)
		}
	}
	known := []string{
		"Destinations", "Routes", "Egress", "Alerts", "Retention", "DrainTimeout", "MaxInFlight", "LogDelivered",
		"Pool", "Pooler", "Schema", "Name", "Version", "Environment", "PollInterval", "Lease", "Watching", "Log", "Hooks", "Spans",
	}
	inspect(t, Config{}, known)
	inspect(t, alert.Config{}, []string{"Channels", "Window", "LagOver", "VacuumBlockedOver"})
	inspect(t, post.Egress{}, []string{"AllowPrivate", "Proxy"})
	inspect(t, post.Destination{}, []string{
		"Name", "URL", "Timeout", "MaxInFlight", "RateLimit", "Retry", "Breaker", "OnFailure", "Responses", "Headers", "SigningSecrets", "Wire", "NATS", "Kafka",
	})
	inspect(t, natspost.Settings{}, []string{"Subject", "Partitions", "Stream", "InboxPrefix", "Credentials", "Seed"})
	inspect(t, kafkapost.Settings{}, []string{"Topic", "Key", "Mechanism"})
	inspect(t, policy.RetryPolicy{}, []string{"Schedule", "MaxAttempts", "Jitter", "RetryAfterMax", "NotAfter"})
	inspect(t, policy.Responses{}, []string{"Retry", "Fail"})
	inspect(t, post.Wire{}, []string{"Format", "Source", "MaxPayloadBytes", "Excerpts", "Authorization", "TLS", "Proxy", "egress"})
	inspect(t, post.TLS{}, []string{"MinVersion", "ServerName", "Roots", "Certificate"})
	for name, change := range changesOfADestination(t) {
		a := complete(func(*Config) {}).Destinations[0]
		other := complete(func(c *Config) { change(&c.Destinations[0]) })
		if got := a.Differences(other.Destinations[0]); len(got) != 1 || !strings.HasPrefix(got[0], cmp.Or(name, "?")) {
			t.Errorf("%s: %q", name, got)
		}
	}
}
