package main

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay"
	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// relayConfig returns what the relay is told. Lists keep the positions they have in the file, which the relay's
// problems refer to.
func (c *config) relayConfig() relay.Config {
	cfg := relay.Config{
		Pool:         c.pool,
		Pooler:       relay.Pooler{Mode: relay.PoolerMode(get[string](c, "database.pooler")), Session: c.direct},
		Environment:  get[string](c, "environment"),
		Schema:       get[string](c, "database.schema"),
		Name:         get[string](c, "relay.name"),
		PollInterval: get[time.Duration](c, "relay.poll_interval"),
		Lease:        get[time.Duration](c, "relay.lease"),
		DrainTimeout: get[time.Duration](c, "relay.drain_timeout"),
		MaxInFlight:  get[int](c, "relay.max_in_flight"),
		LogDelivered: get[bool](c, "relay.log_delivered"),
		Egress:       c.egress(),
		Retention:    c.retention(),
		Alerts: alert.Config{
			Channels:    c.alertChannels(),
			Window:      get[time.Duration](c, "alerts.window"),
			LagOver:     get[time.Duration](c, "alerts.lag_over"),
			HorizonOver: get[time.Duration](c, "alerts.horizon_over"),
		},
	}
	for _, name := range c.destinations {
		cfg.Destinations = append(cfg.Destinations, c.destination(name))
	}
	for _, path := range c.routes {
		cfg.Routes = append(cfg.Routes, relay.Route{Event: get[string](c, path+".event"), To: get[[]string](c, path+".to")})
	}
	return cfg
}

// alertChannels returns the channels in the order of the file.
func (c *config) alertChannels() (channels []alert.Channel) {
	transport := alert.NewTransport(c.egress())
	for _, path := range c.channels {
		if url := get[secret](c, path+".slack"); url != "" {
			channels = append(channels, alert.Slack(string(url), transport))
		}
		if url := get[secret](c, path+".webhook"); url != "" {
			channels = append(channels, alert.Webhook(string(url), transport))
		}
		if url := get[secret](c, path+".service"); url != "" {
			channels = append(channels, newServiceChannel(url, transport))
		}
	}
	return channels
}

func (c *config) destination(name string) post.Destination {
	path := "destinations." + name
	d := post.Destination{
		Name:           name,
		URL:            get[string](c, path+".url"),
		Timeout:        get[time.Duration](c, path+".timeout"),
		MaxInFlight:    get[int](c, path+".max_in_flight"),
		RateLimit:      get[float64](c, path+".rate_limit"),
		OnFailure:      policy.FailurePolicy(get[string](c, path+".on_failure")),
		Breaker:        c.breaker(path),
		SigningSecrets: get[[]webhook.Secret](c, path+".signing_secrets"),
		Retry: policy.RetryPolicy{
			Schedule:      get[[]time.Duration](c, path+".retry.schedule"),
			MaxAttempts:   get[int](c, path+".retry.max_attempts"),
			RetryAfterMax: get[time.Duration](c, path+".retry.retry_after_max"),
			Promise:       get[time.Duration](c, path+".retry.horizon"),
		},
		Responses: policy.Responses{
			Retry: get[[]int](c, path+".responses.retry"),
			Fail:  get[[]int](c, path+".responses.fail"),
		},
		Headers: map[string]string{},
		Wire:    c.wires.of[name],
	}
	if jitter, ok := c.settings[path+".retry.jitter"].value.(float64); ok {
		d.Retry.Jitter = &jitter
	}
	for _, header := range c.headers(name) {
		d.Headers[header] = string(get[secret](c, path+".headers."+header))
	}
	return d
}

// headers returns the names of a destination's headers, sorted.
func (c *config) headers(destination string) []string {
	var names []string
	for path := range maps.Keys(c.settings) {
		if name, ok := strings.CutPrefix(path, "destinations."+destination+".headers."); ok {
			names = append(names, name)
		}
	}
	return slices.Sorted(slices.Values(names))
}
