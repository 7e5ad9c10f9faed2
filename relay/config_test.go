package relay

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/relay/archive"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// usable is a configuration without a mistake.
func usable() Config {
	return Config{Destinations: []post.Destination{{Name: "logistics", URL: "https://logistics.internal/webhooks/finance"}}}
}

func TestUsableConfigurations(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Config){
		"defaults":    func(*Config) {},
		"tight lease": func(c *Config) { c.Lease = 15 * time.Second },
		"routes": func(c *Config) {
			c.Routes = []Route{{Event: "invoice.*", To: []string{"logistics"}}, {Event: "*", To: []string{"logistics"}}}
		},
		"longest name": func(c *Config) { c.Destinations[0].Name = strings.Repeat("a", 63) },
	} {
		c := usable()
		change(&c)
		for _, problem := range c.Validate() {
			t.Errorf("%s: %v", name, problem)
		}
	}
}

func TestEveryMistakeIsFound(t *testing.T) {
	t.Parallel()
	first := func(change func(*post.Destination)) func(*Config) {
		return func(c *Config) { change(&c.Destinations[0]) }
	}
	named := func(name string) func(*Config) { return first(func(d *post.Destination) { d.Name = name }) }

	for name, c := range map[string]struct {
		change func(*Config)
		want   string // the beginning of the problem
	}{
		"no destination":         {func(c *Config) { c.Destinations = nil }, "destinations: there is none"},
		"name empty":             {named(""), "destinations.: the name \"\" is not usable"},
		"name upper case":        {named("Logistics"), "destinations.Logistics: the name"},
		"name with slash":        {named("a/b"), "destinations.a/b: the name"},
		"name with dots":         {named("a..b"), "destinations.a..b: the name"},
		"name with quote":        {named(`a"b`), `destinations.a"b: the name`},
		"name emoji":             {named("🚀"), "destinations.🚀: the name"},
		"name begins with dash":  {named("-a"), "destinations.-a: the name"},
		"name with line feed":    {named("a\n"), "destinations.a\n: the name"},
		"name of 64":             {named(strings.Repeat("a", 64)), "destinations.aaaa"},
		"name twice":             {func(c *Config) { c.Destinations = append(c.Destinations, c.Destinations[0]) }, "destinations.logistics: the name is used twice"},
		"poll too short":         {func(c *Config) { c.PollInterval = time.Second - 1 }, "relay.poll_interval: "},
		"poll negative":          {func(c *Config) { c.PollInterval = -time.Second }, "relay.poll_interval: "},
		"lease negative":         {func(c *Config) { c.Lease = -time.Second }, "relay.lease: "},
		"lease below timeout":    {func(c *Config) { c.Lease = 5 * time.Second }, "relay.lease: 5s must be at least 5s longer than destinations.logistics.timeout (10s); write 15s"},
		"lease too long":         {func(c *Config) { c.Lease = 24*time.Hour + 1 }, "relay.lease: "},
		"lease within margin":    {func(c *Config) { c.Lease = 15*time.Second - 1 }, "relay.lease: "},
		"timeout above lease":    {first(func(d *post.Destination) { d.Timeout = time.Minute }), "relay.lease: 1m0s must be"},
		"drain negative":         {func(c *Config) { c.DrainTimeout = -1 }, "relay.drain_timeout: "},
		"in flight negative":     {func(c *Config) { c.MaxInFlight = -1 }, "relay.max_in_flight: "},
		"in flight huge":         {func(c *Config) { c.MaxInFlight = 1_000_000 }, "relay.max_in_flight: "},
		"after negative":         {func(c *Config) { c.Alerts.After = -1 }, "alerts.after: "},
		"after of no rule":       {func(c *Config) { c.Alerts.AfterByRule = map[string]time.Duration{"lagg": 1} }, "alerts.after_by_rule: "},
		"repeat too short":       {func(c *Config) { c.Alerts.Repeat = 1 }, "alerts.repeat: "},
		"of a destination":       {first(func(d *post.Destination) { d.Timeout = -1 }), "destinations.logistics.timeout: "},
		"route without event":    {func(c *Config) { c.Routes = []Route{{Event: "", To: []string{"logistics"}}} }, "routes[0].event: "},
		"route with blank":       {func(c *Config) { c.Routes = []Route{{Event: "a b", To: []string{"logistics"}}} }, "routes[0].event: "},
		"route too long":         {func(c *Config) { c.Routes = []Route{{Event: strings.Repeat("a", 256), To: []string{"logistics"}}} }, "routes[0].event: "},
		"route without target":   {func(c *Config) { c.Routes = []Route{{Event: "*", To: nil}} }, "routes[0].to: names no destination"},
		"route to a stranger":    {func(c *Config) { c.Routes = []Route{{Event: "*", To: []string{"logistic"}}} }, `routes[0].to: there is no destination "logistic"`},
		"name of the relay: NUL": {func(c *Config) { c.Name = "a\x00b" }, "relay.name: "},
		"schema with NUL":        {func(c *Config) { c.Schema = "a\x00b" }, "database.schema: "},
	} {
		config := usable()
		c.change(&config)
		found := false
		for _, problem := range config.Validate() {
			found = found || strings.HasPrefix(problem.Error(), c.want)
		}
		if !found {
			t.Errorf("%s: %v, want %q", name, config.Validate(), c.want)
		}
	}
}

func TestNewTellsEveryMistakeAtOnce(t *testing.T) {
	t.Parallel()
	_, err := New(Config{Pool: &pgxpool.Config{}, PollInterval: 1, Lease: 1, Destinations: []post.Destination{{Name: "A", URL: "ftp://x"}}})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"relay.poll_interval", "relay.lease", "destinations.A:", "destinations.A.url"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in:\n%v", want, err)
		}
	}
	if _, err := New(usable()); err == nil || !strings.Contains(err.Error(), "database") {
		t.Errorf("without a database: %v", err)
	}
}

func TestDefaultsDoNotReachIntoTheCallersConfig(t *testing.T) {
	t.Parallel()
	given := usable()
	if got := given.withDefaults().Destinations[0]; got.Timeout != post.DefaultTimeout || got.MaxInFlight != post.DefaultLaneInFlight || got.Retry.MaxAttempts != policy.DefaultMaxAttempts {
		t.Errorf("%+v", got)
	}
	if d := given.Destinations[0]; d.Timeout != 0 || d.MaxInFlight != 0 || d.Retry.Schedule != nil || given.Routes != nil {
		t.Errorf("the caller's configuration was changed: %+v", given)
	}
}

func TestEnvironmentName(t *testing.T) {
	t.Parallel()
	for name, good := range map[string]bool{
		"": true, "production": true, "eu-1 / blue": true, strings.Repeat("x", 63): true,
		strings.Repeat("x", 64): false, " production": false, "production ": false, "prod\nuction": false, "münchen": false, "a\x00": false,
	} {
		cfg := Config{Environment: name, Destinations: []post.Destination{to("http://receiver.test/")}}
		found := slices.ContainsFunc(cfg.Validate(), func(p Problem) bool { return p.Path == "environment" })
		if found == good {
			t.Errorf("%q: refused is %v", name, found)
		}
	}
}

func TestRetentionMistakes(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		keep archive.Retention
		want string // empty: fine
	}{
		"nothing":                 {archive.Retention{}, ``},
		"the defaults":            {archive.Retention{ArchiveAfter: archive.DefaultArchiveAfter, DeleteAfter: archive.DefaultDeleteAfter, Attempts: archive.DefaultKeepAttempts, ProcessedEvents: archive.DefaultKeepProcessed, Schedule: archive.DefaultArchiveSchedule}, ``},
		"archived, never dropped": {archive.Retention{ArchiveAfter: days}, ``},
		"dropped, never archived": {archive.Retention{DeleteAfter: 30 * days}, ``},
		"archived too soon":       {archive.Retention{ArchiveAfter: days - 1}, `retention.archive_after: 23h59m59.999999999s is too short: the database refuses less than 24h; write 24h or more, or 0 for ever`},
		"dropped too soon":        {archive.Retention{DeleteAfter: 29 * days}, `retention.delete_after: 696h0m0s is too short: the database refuses less than 720h; write 720h or more, or 0 for ever`},
		"no log":                  {archive.Retention{Attempts: time.Hour}, `retention.attempts: 1h0m0s is too short: the database refuses less than 24h; write 24h or more, or 0 for ever`},
		"no memory":               {archive.Retention{ProcessedEvents: time.Hour}, `retention.processed_events: 1h0m0s is too short: the database refuses less than 24h; write 24h or more, or 0 for ever`},
		"a macro":                 {archive.Retention{Schedule: "@daily"}, ``},
		"an interval":             {archive.Retention{Schedule: "@every 6h"}, ``},
		"negative":                {archive.Retention{ArchiveAfter: -1}, `retention.archive_after: -1ns is negative; write a duration such as 720h, or 0 for ever`},
		"dropped before archived": {archive.Retention{ArchiveAfter: 1000 * time.Hour, DeleteAfter: 720 * time.Hour}, `retention.delete_after: 720h0m0s is shorter than retention.archive_after (1000h0m0s), so that what is archived would be dropped at once; write 1000h0m0s or more, or 0 for ever`},
		"a short memory":          {archive.Retention{ProcessedEvents: 100 * time.Hour}, `retention.processed_events: 100h0m0s is shorter than destinations.default.retry.not_after (720h0m0s), until when a duplicate may come, and would be processed again; write 720h or more, or 0 for ever, or a shorter not_after`},
		"just long enough":        {archive.Retention{ProcessedEvents: 720 * time.Hour}, ``},
		"six fields":              {archive.Retention{Schedule: "0 17 3 * * *"}, `retention.schedule: "0 17 3 * * *" is not a schedule; write one such as "17 3 * * *": minute, hour, day of the month, month, day of the week, in UTC`},
		"no such minute":          {archive.Retention{Schedule: "60 3 * * *"}, `retention.schedule: "60 3 * * *" is not a schedule; write one such as "17 3 * * *": minute, hour, day of the month, month, day of the week, in UTC`},
		"a time zone":             {archive.Retention{Schedule: "TZ=Europe/Berlin 17 3 * * *"}, `retention.schedule: names a time zone, where an hour is skipped or repeated; write one such as "17 3 * * *": minute, hour, day of the month, month, day of the week, in UTC`},
		"a time zone alone":       {archive.Retention{Schedule: "CRON_TZ=UTC"}, `retention.schedule: names a time zone, where an hour is skipped or repeated; write one such as "17 3 * * *": minute, hour, day of the month, month, day of the week, in UTC`},
		"without a pause":         {archive.Retention{Schedule: "@every 0s"}, `retention.schedule: "@every 0s" is too often; write @every 1m or more`},
		"a huge batch":            {archive.Retention{Batch: 10_001}, `retention.batch: 10001 is out of range; write 1 to 10000`},
	} {
		var got []string
		for _, problem := range (Config{Destinations: []post.Destination{to("http://receiver.test/")}, Retention: test.keep}).Validate() {
			got = append(got, problem.Error())
		}
		if text := strings.Join(got, "\n"); text != test.want {
			t.Errorf("%s: got\n%s\nwant\n%s", name, text, test.want)
		}
	}
}
