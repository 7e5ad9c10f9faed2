package relay

import (
	"maps"
	"slices"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/routes"
)

// restarts returns which settings differ that a running relay cannot change.
func (c *Config) restarts(next *Config) []string {
	var v check.Differences
	v.Compare("database.url", samePool(c.Pool, next.Pool))
	v.Compare("database.pooler", c.Pooler.Mode == next.Pooler.Mode)
	v.Compare("database.listen_url", samePool(c.Pooler.Session, next.Pooler.Session))
	v.Compare("database.schema", c.Schema == next.Schema)
	v.Compare("database.allow_superuser", c.AllowSuperuser == next.AllowSuperuser)
	v.Compare("environment", c.Environment == next.Environment)
	v.Compare("relay.name", c.Name == next.Name)
	v.Compare("relay.poll_interval", c.PollInterval == next.PollInterval)
	v.Compare("relay.sleep_after", c.SleepAfter == next.SleepAfter)
	v.Compare("relay.lease", c.Lease == next.Lease)
	v.Compare("watching", c.Watching == next.Watching)
	v.Compare("relay.history", (c.History == nil) == (next.History == nil))
	return v
}

// stay gives a configuration what the one at the start decided for good.
func (c *Config) stay(start *Config) {
	c.Pool, c.Pooler, c.Schema, c.Environment = start.Pool, start.Pooler, start.Schema, start.Environment
	c.AllowSuperuser, c.Name, c.Version = start.AllowSuperuser, start.Name, start.Version
	c.PollInterval, c.Lease, c.Watching = start.PollInterval, start.Lease, start.Watching
	c.SleepAfter, c.Resume = start.SleepAfter, start.Resume
	c.Log, c.Hooks, c.Spans, c.History = start.Log, start.Hooks, start.Spans, start.History
}

// fixed returns what of a configuration a reload does not change. The rest is empty, so that no
// code reads what was true at the start.
func (c Config) fixed() (f Config) {
	f.stay(&c)
	return f
}

// differences describes what changes from one configuration to the next, but for what needs a
// restart. It holds no secret.
func (c *Config) differences(next *Config) (all []string) {
	all = append(post.Differences(c.Destinations, next.Destinations), routes.Differences(c.Routes, next.Routes)...)
	var v check.Differences
	v.Compare("egress.allow_private", (c.Egress.AllowPrivate == nil) == (next.Egress.AllowPrivate == nil) && slices.Equal(c.Egress.AllowPrivate, next.Egress.AllowPrivate))
	v.Compare("egress.proxy", c.Egress.Proxy == next.Egress.Proxy)
	v.Compare("alerts.channels", slices.Equal(channelNames(c.Alerts), channelNames(next.Alerts)))
	v.Compare("alerts.after", c.Alerts.After == next.Alerts.After)
	v.Compare("alerts.after_by_rule", maps.Equal(c.Alerts.AfterByRule, next.Alerts.AfterByRule))
	v.Compare("alerts.repeat", c.Alerts.Repeat == next.Alerts.Repeat)
	v.Compare("admin.public_url", c.Alerts.PublicURL == next.Alerts.PublicURL)
	v.Compare("alerts.lag_over", c.Alerts.LagOver == next.Alerts.LagOver)
	v.Compare("alerts.vacuum_blocked_over", c.Alerts.VacuumBlockedOver == next.Alerts.VacuumBlockedOver)
	v.Compare("retention", c.Retention == next.Retention)
	v.Compare("relay.drain_timeout", c.DrainTimeout == next.DrainTimeout)
	v.Compare("relay.max_in_flight", c.MaxInFlight == next.MaxInFlight)
	v.Compare("relay.attempt_log", c.LogDelivered == next.LogDelivered)
	return append(all, v...)
}

// channelNames returns the sorted names of the channels.
func channelNames(a alert.Config) (names []string) {
	for _, channel := range a.Channels {
		names = append(names, channel.Name())
	}
	slices.Sort(names)
	return names
}

// samePool reports whether two pools lead to the same database, with the same credential.
func samePool(a, b *pgxpool.Config) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.ConnString() == b.ConnString() && a.MaxConns == b.MaxConns
}
