package relay

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/archive"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// reload puts a configuration into effect that must be fit for it.
func (r *running) reload(cfg Config) []string {
	r.t.Helper()
	changes, err := r.Reload(cfg)
	relaytest.Must(r.t, err)
	return changes
}

func named(name string, d post.Destination) post.Destination {
	d.Name = name
	return d
}

// What is on its way ends where it began; what follows goes to the new place, with the new secret.
func TestReloadChangesADestination(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	g := relaytest.NewGate(t)
	before := relaytest.NewReceiver(t, func(_ http.ResponseWriter, r relaytest.Request) { g.Pass(r) })
	after := relaytest.NewReceiver(t, nil)
	d := to(before.URL + "/in?token=hunter2")
	d.SigningSecrets = []webhook.Secret{signingSecret(t, 1)}
	r := start(t, config(db, d))
	db.Insert(1, "first")
	<-g.Arrived

	d.URL, d.SigningSecrets, d.Timeout = after.URL+"/in?token=hunter3", []webhook.Secret{signingSecret(t, 2)}, 7*time.Second
	if got, want := r.reload(config(db, d)), "[destinations.default changed: url, timeout, signing_secrets]"; fmt.Sprint(got) != want {
		t.Errorf("changes are %s, want %s", got, want)
	}
	db.Insert(1, "second")
	r.settles(t, policy.Delivered, 1)
	g.Open()
	r.settles(t, policy.Delivered, 2)
	if !slices.Equal(before.Keys(), []string{"first-1"}) || !slices.Equal(after.Keys(), []string{"second-1"}) {
		t.Errorf("the old place got %v, the new one %v", before.Keys(), after.Keys())
	}
	if before.All()[0].Header.Get(webhook.Signature) == "" || before.All()[0].Header.Get(webhook.Signature) == after.All()[0].Header.Get(webhook.Signature) {
		t.Error("the secret is not the new one")
	}
	if got := r.reload(config(db, d)); got != nil {
		t.Errorf("the same configuration changes %v", got)
	}
}

// signingSecret returns one of many.
func signingSecret(t *testing.T, n int) webhook.Secret {
	t.Helper()
	return secret(t, "whsec_"+base64.StdEncoding.EncodeToString(fmt.Appendf(nil, "%032d", n)))
}

// A destination comes and goes with its routes. What waits for it is unserved until it comes back.
func TestReloadAddsAndRemovesDestinations(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc, other := relaytest.NewReceiver(t, nil), relaytest.NewReceiver(t, nil)
	g := relaytest.NewGate(t)
	slow := relaytest.NewReceiver(t, func(_ http.ResponseWriter, r relaytest.Request) { g.Pass(r) })
	with := func(change func(*Config)) Config {
		cfg := config(db, to(rc.URL), named("other", to(other.URL)), named("slow", post.Destination{URL: slow.URL, MaxInFlight: 1, Timeout: 9 * time.Minute}))
		cfg.Lease = 10 * time.Minute // a busy machine must not end the request that is on its way
		change(&cfg)
		return cfg
	}
	all := func(*Config) {}
	alone := func(cfg *Config) { cfg.Destinations = cfg.Destinations[:1] }
	r := start(t, with(alone))
	db.Insert(1, "one")
	r.settles(t, policy.Delivered, 1)

	if got, want := r.reload(with(all)), "[destinations.other added destinations.slow added routes: 2 added, 0 removed]"; fmt.Sprint(got) != want {
		t.Errorf("changes are %s, want %s", got, want)
	}
	db.Insert(3, "all")
	<-g.Arrived
	r.settles(t, policy.Delivered, 7)

	// One delivery is on its way to slow, and ends; the two that are queued behind it are given
	// back, and wait.
	r.reload(with(alone))
	r.await(t, "what was queued", func(o *observer) bool { return o.reasons[policy.ReasonRemoved] == 1 })
	relaytest.Becomes(db, 2, "SELECT count(*)::int FROM outbox_delivery WHERE status = 'pending' AND claimed_by IS NULL AND destination = 'slow'")
	g.Open()
	r.settles(t, policy.Delivered, 8)
	db.Insert(1, "afterwards")
	r.settles(t, policy.Delivered, 9)
	if other.Total() != 3 || slow.Total() != 1 {
		t.Errorf("other got %v, slow %v", other.Keys(), slow.Keys())
	}

	// And back again.
	r.reload(with(all))
	r.settles(t, policy.Delivered, 11)
	if slow.Total() != 3 {
		t.Errorf("slow got %v", slow.Keys())
	}
}

// A route that was missing needs no restart: what is parked goes out.
func TestReloadReleasesWhatIsParked(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	cfg := config(db, to(relaytest.NewReceiver(t, nil).URL))
	cfg.Routes = []Route{{Event: "other", To: []string{"default"}}}
	r := start(t, cfg)
	db.Insert(1, "early")
	cfg.Routes = []Route{{Event: "other", To: []string{"default"}}, {Event: "t", To: []string{"default"}}}
	if got, want := r.reload(cfg), "[routes: 1 added, 0 removed]"; fmt.Sprint(got) != want {
		t.Errorf("changes are %s, want %s", got, want)
	}
	r.settles(t, policy.Delivered, 1)
}

// Reloads race with each other, with deliveries and with everything else that reads the
// configuration. Each event still arrives once, at one of the places.
func TestReloadUnderLoad(t *testing.T) {
	t.Parallel()
	testsize.Long(t)
	db := relaytest.Covered(t)
	places := []*relaytest.Receiver{relaytest.NewReceiver(t, nil), relaytest.NewReceiver(t, nil), relaytest.NewReceiver(t, nil)}
	variant := func(n int) Config {
		d := to(places[n%3].URL)
		d.MaxInFlight, d.RateLimit = 4+n%7, float64(n%2)*10_000
		d.SigningSecrets = []webhook.Secret{signingSecret(t, n%4)}
		d.Breaker.Disabled, d.OnFailure = n%3 == 0, map[bool]policy.FailurePolicy{true: policy.SkipFailed, false: policy.BlockFailed}[n%2 == 0]
		cfg := config(db, d)
		cfg.LogDelivered, cfg.MaxInFlight, cfg.Alerts.LagOver = n%2 == 0, 8+n, time.Duration(n+1)*time.Minute
		cfg.Retention.ArchiveAfter = time.Duration(n) * days
		cfg.Routes = []Route{{Event: "*", To: []string{"default"}}, {Event: fmt.Sprint("never.", n), To: []string{"default"}}}
		return cfg
	}
	r := start(t, variant(0))
	r.relayID()
	var writing, reloading sync.WaitGroup
	events := testsize.Of(3000, 1000)
	writing.Go(func() {
		for i := range events / 100 {
			db.Insert(100, fmt.Sprint("batch-", i))
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
		for _, r := range place.All() {
			seen[r.Key]++
			if r.Header.Get(webhook.Signature) == "" {
				t.Errorf("%s is not signed", r.Key)
			}
		}
	}
	twice := slices.Collect(maps.Keys(seen))
	twice = slices.DeleteFunc(twice, func(key string) bool { return seen[key] == 1 })
	if len(seen) != events || len(twice) > 0 {
		t.Errorf("%d of %d events arrived, %d more than once", len(seen), events, len(twice))
	}
	if got, want := storedRoutes(db), routesOfConfig(*r.config()); got != want {
		t.Errorf("the stored routes are %s, those in effect %s", got, want)
	}
}

// What needs a restart is named and stays, the rest is in effect; together they still have to make
// sense.
func TestReloadOfWhatNeedsARestart(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, nil)
	var hooked []string
	cfg := config(db, to(rc.URL))
	cfg.Hooks.Reloaded = func(changes []string, err error) { hooked = append(hooked, fmt.Sprint(changes, err)) }
	r := start(t, cfg)
	cfg = config(db, to(rc.URL))
	cfg.Pool.ConnConfig.Password = "other"
	cfg.Pool = settings(t, strings.Replace(db.DSN, "?", "?connect_timeout=7&", 1))
	cfg.Name, cfg.Lease, cfg.PollInterval, cfg.Environment, cfg.Schema = "renamed", time.Hour, time.Minute, "moon", "public"
	cfg.Pooler.Mode, cfg.Pooler.Session, cfg.Watching.Interval, cfg.DrainTimeout = PoolerNone, settings(t, db.DSN), time.Minute, time.Second
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
	testkit.Equal(t, "a reload that failed changed something", r.config().Destinations[0].Timeout, before)
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

// Before the database has answered, and while it is away, a configuration takes effect; its routes
// follow when it is back.
func TestReloadWithoutADatabase(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	link := newLink(t, db.DSN)
	link.block(true)
	rc := relaytest.NewReceiver(t, nil)
	cfg := config(db, to("http://receiver.invalid"), named("never", to("http://receiver.invalid")))
	cfg.Pool = settings(t, link.dsn)
	r := start(t, cfg)
	r.await(t, "a failure", func(o *observer) bool { return o.failures["prepare"] > 0 })

	cfg.Destinations = []post.Destination{to(rc.URL), named("second", to(rc.URL))}
	cfg.Routes = []Route{{Event: "t", To: []string{"default"}}}
	r.reload(cfg)
	link.block(false)
	r.relayID()
	db.Insert(1, "one")
	r.settles(t, policy.Delivered, 1)

	link.block(true)
	link.cut()
	relaytest.Eventually(t, "the end of the session", func() bool { _, alive := r.current(); return !alive })
	cfg.Destinations = cfg.Destinations[:1]
	cfg.Routes = []Route{{Event: "t*", To: []string{"default"}}}
	r.reload(cfg)
	link.block(false)
	relaytest.Becomes(db, "t*", "SELECT pattern FROM outbox_route")
	db.Insert(1, "two")
	r.settles(t, policy.Delivered, 2)
}

// A reload undoes what was done to the stored routes by hand, also when the configuration is the
// same.
func TestReloadRestoresRoutes(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t)
	r := prepared(t, config(db, to("http://receiver.invalid")))
	r.signals.routes = nil // the relay follows the stored routes by itself, too
	r.begin()
	r.relayID()
	db.Exec("DELETE FROM outbox_route; INSERT INTO outbox_route (pattern, destination) VALUES ('by.hand', 'default')")
	cfg := config(db, to("http://receiver.invalid"))
	testkit.Equal(t, "changes", fmt.Sprint(r.reload(cfg)), "[routes: 1 restored]")
	testkit.Equal(t, "the routes", storedRoutes(db), "* default")
	if got := r.reload(cfg); got != nil {
		t.Errorf("the same configuration changes %v", got)
	}
	cfg.Routes = nil
	for i := range 10_000 {
		cfg.Routes = append(cfg.Routes, Route{Event: fmt.Sprint("event.", i), To: []string{"default"}})
	}
	testkit.Equal(t, "changes", fmt.Sprint(r.reload(cfg)), "[routes: 10000 added, 1 removed]")
	testkit.Equal(t, "routes", relaytest.Row[int](db, "SELECT count(*) FROM outbox_route"), 10_000)
}

// A lostCommit is a database whose first commit succeeds, but whose answer is lost.
type lostCommit struct {
	pg.Pool
	lost atomic.Bool
}

type lostCommitTx struct {
	pgx.Tx
	lost *atomic.Bool
}

func (c *lostCommit) Begin(ctx context.Context) (pgx.Tx, error) {
	tx, err := c.Pool.Begin(ctx)
	return lostCommitTx{tx, &c.lost}, err
}

func (t lostCommitTx) Commit(ctx context.Context) error {
	err := t.Tx.Commit(ctx)
	if err == nil && t.lost.CompareAndSwap(false, true) {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// The database may have taken the routes of a configuration that was refused, since no answer came.
// Soon it has those of the configuration in effect.
func TestReloadWhoseCommitGetsNoAnswer(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	r := start(t, config(db, to("http://receiver.invalid")))
	r.relayID()
	r.reloads.mu.Lock()
	r.reloads.keeper.DB = &lostCommit{Pool: r.reloads.keeper.DB}
	r.reloads.mu.Unlock()
	other := to("http://receiver.invalid")
	other.Name = "other"
	if _, err := r.Reload(config(db, other)); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatalf("the reload: %v", err)
	}
	relaytest.Becomes(db, "default", `SELECT string_agg(destination, ' ') FROM outbox_relay_destination`)
	relaytest.Becomes(db, "default", `SELECT string_agg(destination, ' ') FROM outbox_route`)
}

// Alerts go to the channels that there are now.
func TestReloadOfAlertChannels(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	first, second := relaytest.NewReceiver(t, nil), relaytest.NewReceiver(t, nil)
	cfg := failing(t, db, alert.Webhook(first.URL, direct))
	r := start(t, cfg)
	cfg.Alerts.Channels = []alert.Channel{alert.Webhook(second.URL, direct)}
	testkit.Equal(t, "changes", fmt.Sprint(r.reload(cfg)), "[alerts.channels]")
	db.Insert(1, "one")
	r.await(t, "the message", func(o *observer) bool { return len(o.notices) == 1 })
	if first.Total() != 0 || second.Total() != 1 {
		t.Errorf("%d messages to the channel that was removed, %d to the new one", first.Total(), second.Total())
	}
}

// A configuration that was refused stands in the relay's row until one is used, and so do digests
// of what it has.
func TestRefusedReloadIsRecorded(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	cfg := config(db, to("http://receiver.invalid"))
	r := start(t, cfg)
	r.relayID()
	const stands = `SELECT coalesce(reload_error, '') FROM outbox_relay`
	r.RefuseReload(errors.New("destinations: there are none"))
	relaytest.Becomes(db, "destinations: there are none", stands)
	digests := relaytest.Row[string](db, `SELECT settings || secrets FROM outbox_relay_destination`)
	cfg.Destinations[0].Headers = map[string]string{"A": "b"}
	r.reload(cfg)
	relaytest.Becomes(db, "", stands)
	relaytest.Becomes(db, true, `SELECT length(settings || secrets) = 8 AND settings || secrets <> $1 FROM outbox_relay_destination`, digests)
}

// Retention follows, and a run under way ends, since it removes what is to be kept now.
func TestReloadOfRetention(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	cfg := config(db, to("http://receiver.invalid"))
	r := prepared(t, cfg)
	jobs := newJobs(r.cfg.Log)
	plan := archive.Schedule{Jobs: jobs, Run: r.archive}
	schedules := func(keep archive.Retention) int {
		cfg.Retention = keep
		r.reload(cfg)
		plan.Follow(t.Context(), r.config().Retention)
		return len(jobs.Entries())
	}
	testkit.Equal(t, "runs are planned", schedules(archive.Retention{ArchiveAfter: days}), 1)
	first := jobs.Entries()[0].ID
	if schedules(archive.Retention{ArchiveAfter: days}); jobs.Entries()[0].ID != first {
		t.Error("planned again although nothing changed")
	}
	if schedules(archive.Retention{ArchiveAfter: 2 * days}); len(jobs.Entries()) != 1 || jobs.Entries()[0].ID == first {
		t.Error("not planned again")
	}
	testkit.Equal(t, "runs are planned", schedules(archive.Retention{}), 0)
}

// What a breaker holds goes at its next probe when it is switched off.
func TestReloadSwitchesABreakerOff(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	rc := relaytest.NewReceiver(t, relaytest.Status(http.StatusServiceUnavailable))
	d := to(rc.URL)
	d.Breaker = policy.BreakerPolicy{Failures: 1, ProbeAfter: 250 * time.Millisecond, ProbeMax: 250 * time.Millisecond}
	d.Retry.MaxAttempts = 3
	r := start(t, config(db, d))
	db.Insert(5, "one")
	relaytest.Becomes(db, 1, "SELECT count(*)::int FROM outbox_destination WHERE breaker = 'open'")
	d.Breaker.Disabled = true
	testkit.Equal(t, "changes", fmt.Sprint(r.reload(config(db, d))), "[destinations.default changed: breaker]")
	r.settles(t, policy.Fail, 5)
	relaytest.Becomes(db, 0, "SELECT count(*)::int FROM outbox_destination WHERE breaker <> 'closed'")
}

// Each setting of a configuration either makes a difference, or stays, or is part of what is
// compared otherwise.
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
		"Alerts.After":  func(c *Config) { c.Alerts.After = time.Hour },
		"Alerts.Rules":  func(c *Config) { c.Alerts.AfterByRule = map[string]time.Duration{alert.RuleLag: time.Minute} },
		"Alerts.Repeat": func(c *Config) { c.Alerts.Repeat = 2 * time.Hour },
		"Alerts.Page":   func(c *Config) { c.Alerts.PublicURL = "https://page" },
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
		"Pool", "Pooler", "Schema", "AllowSuperuser", "Name", "Version", "Environment", "PollInterval", "Lease", "Watching", "Log", "Hooks", "Spans", "History",
		"Entry", "SleepAfter", "Resume",
	}
	relaytest.CheckFields(t, Config{}, known...)
	relaytest.CheckFields(t, alert.Config{}, "Channels", "After", "AfterByRule", "Repeat", "LagOver", "VacuumBlockedOver", "PublicURL")
	relaytest.CheckFields(t, post.Egress{}, "AllowPrivate", "Proxy")
}

// What follows files is compared by what it returns now, and made again whatever that is: the files
// may be others.
func TestWhatFollowsFilesIsMadeAnew(t *testing.T) {
	t.Parallel()
	token := func(text string) post.Destination {
		d := post.Destination{Name: "default", URL: "http://receiver.invalid"}
		d.Wire.Authorization = func() string { return text }
		return d
	}
	db := relaytest.Covered(t)
	r := prepared(t, config(db, token("a")))
	before := r.lane("default").Current()
	if got := r.reload(config(db, token("a"))); got != nil {
		t.Errorf("the same token changes %v", got)
	}
	if r.lane("default").Current() == before {
		t.Error("it follows the files of before")
	}
	testkit.Equal(t, "another token changes", r.reload(config(db, token("b"))), []string{"destinations.default changed: credential"})
}
