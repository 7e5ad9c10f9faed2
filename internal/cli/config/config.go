package config

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/relay"
)

// A Config is the whole configuration of the program. Its table binds the settings to these fields.
type Config struct {
	*settings.Set

	Relay         relay.Config    // complete but for version, log and hooks
	Pool          *pgxpool.Config // of database.url; nil if that is unusable, or if Outboxes holds several
	Outboxes      []Outbox        // of databases; nil unless the command serves several
	SleepAfter    time.Duration   // for relay.Config, if there are several
	Direct        *pgxpool.Config // of database.listen_url; nil if there is none
	MetricsListen string          // empty: none
	// MetricsDestinations is how many destinations have their own series.
	MetricsDestinations int
	Traces              Traces
	Admin               Admin
	LogFormat           string         // auto, json or console
	Log                 zerolog.Logger // for changes of files that destinations name; discards until the log exists

	databaseURL, listenURL settings.Secret
	logLevelName           string
}

// A destination is a relay's destination with the settings that only its [relay.Wire] is made of.
type destination struct {
	relay.Destination
	caFile, certFile, keyFile string
	bearer, password          settings.Secret
	bearerFile, passwordFile  string
	user                      string
	credentialsFile, seedFile string
}

// sources are what a configuration is read from.
type sources struct {
	Env      []string          // "NAME=value", as os.Environ returns it
	Flags    map[string]string // those that were given, by name
	Hostname string            // the default of relay.name
	NoFile   bool              // leave the file out
	All      bool              // the command serves all entries of databases
}

func sourcesOf(inv *cli.Invocation, all bool) sources {
	hostname, _ := os.Hostname() // only a default, and config show says so
	return sources{Env: inv.Env, Flags: inv.Flags, Hostname: hostname, All: all}
}

// Read is [load] for a command. It prints the warnings; mistakes are an error.
func Read(inv *cli.Invocation, sections ...string) (*Config, error) {
	return warned(inv, Load(inv, sections...))
}

// readAll is [Read] for a command that serves all entries of databases, see [LoadAll].
func readAll(inv *cli.Invocation, sections ...string) (*Config, error) {
	return warned(inv, LoadAll(inv, sections...))
}

func warned(inv *cli.Invocation, c *Config) (*Config, error) {
	for _, w := range c.Warnings {
		fmt.Fprintf(inv.Stderr, "warning: %s\n", w)
	}
	return c, c.Err()
}

// ReadToLook is [Read] for a command that changes nothing: it does without a file that cannot be
// read, as long as the environment names the database.
func ReadToLook(inv *cli.Invocation, sections ...string) (*Config, error) {
	c := Load(inv, sections...)
	if !c.Readable {
		if alone := WithoutFile(inv, sections...); alone.Err() == nil {
			for _, p := range c.Problems {
				fmt.Fprintf(inv.Stderr, "warning: %s; the database is that of the environment\n", p)
			}
			return alone, nil
		}
	}
	return Read(inv, sections...)
}

// WithoutFile is [Load] from flags and environment alone.
func WithoutFile(inv *cli.Invocation, sections ...string) *Config {
	from := sourcesOf(inv, false)
	from.NoFile = true
	return loadFrom(from, sections...)
}

// Load reads and checks the whole configuration. With sections, only their mistakes are reported:
// migrations need a database, and neither the secrets nor the destinations that the relay reads
// from the same file.
func Load(inv *cli.Invocation, sections ...string) *Config {
	return loadFrom(sourcesOf(inv, false), sections...)
}

// loadFrom is [load] for sources that are no command's.
func loadFrom(from sources, sections ...string) *Config {
	c := &Config{Log: zerolog.Nop()}
	c.Set = settings.Load(c.table(from.Hostname), settings.Sources{Env: from.Env, Flags: from.Flags, NoFile: from.NoFile})
	c.Inherit("destinations", "defaults")
	if c.Readable {
		c.bind()
		name, given := from.Flags["database"]
		c.choose(name, given, from.All)
	}
	c.Keep(withDatabases(sections)...)
	return c
}

// bind writes the settings into the fields, and reports mistakes beyond the single value: first
// those that the relay cannot know, then the relay's own.
func (c *Config) bind() {
	names := c.Children("destinations")
	if len(c.Children("routes")) == 0 && len(names) > 0 { // every type goes everywhere
		c.Add("routes", "routes[0]", settings.Origin{})
		c.Default("routes[0].event", "*")
		c.Default("routes[0].to", slices.Clone(names))
	}
	c.Bind("", slices.Concat(c.databaseRows(), c.relayRows(""), c.egressRows(), c.alertRows(), c.retentionRows(), c.metricsRows(), c.tracesRows(), c.adminRows(), c.logRows()))
	c.bindOutboxes()
	c.checkDatabase()
	c.Relay.Pool, c.Relay.Pooler.Session = c.Pool, c.Direct
	c.bindDestinations(names)
	var route relay.Route
	rows, paths := routeRows(&route), c.Children("routes")
	c.Relay.Routes = slices.Grow(c.Relay.Routes, len(paths))
	for _, path := range paths {
		route = relay.Route{}
		c.Bind(path, rows)
		c.Relay.Routes = append(c.Relay.Routes, route)
	}
	c.bindChannels()
	c.checkSchedules()
	c.checkAdmin()
	c.checkTraces()
	c.checkRelay()
}

// bindDestinations reads the destinations with these names.
func (c *Config) bindDestinations(names []string) {
	var d destination
	rows := slices.Concat(targetRows(&d), policyRows(&d), credentialRows(&d), brokerRows(&d)) // once: there may be thousands of names
	if len(names) > 0 && !slices.Contains(names, DefaultDestination) {
		c.refuseDefaultDestination(rows)
	}
	c.Relay.Destinations = slices.Grow(c.Relay.Destinations, len(names))
	for _, name := range names {
		d = destination{Destination: relay.Destination{Name: name}}
		path := "destinations." + name
		c.Bind(path, rows)
		own := d // the functions below keep what they are given
		own.Wire.Authorization = c.authorization(path, &own)
		c.bindTLS(path, &own)
		c.bindBroker(path, &own)
		c.Relay.Destinations = append(c.Relay.Destinations, own.Destination)
	}
}

// addDefaultDestination makes a destination that takes every type. Beside destinations of the file
// that do not include it, it would double every event.
func addDefaultDestination(s *settings.Set, at settings.Origin) {
	switch names := s.Children("destinations"); {
	case slices.Contains(names, DefaultDestination):
	case len(names) > 0:
		s.Problem(at, "destinations."+DefaultDestination, "stands beside the destinations of %s (%s): every event would go to both; unset it, or write its URL into the file",
			s.File, strings.Join(names, ", "))
	default:
		s.Add("destinations", DefaultDestination, at)
	}
}

// bindChannels reads the alert channels, in the order of the file.
func (c *Config) bindChannels() {
	transport := alert.NewTransport(c.Relay.Egress)
	seen := map[string]bool{}
	for _, path := range c.Children("alerts.channels") {
		if c.Failed(path) || c.FailedBelow(path) {
			continue
		}
		var made []alert.Channel
		c.Bind(path, channelRows(&made, transport))
		switch {
		case len(made) == 0:
			c.ProblemAt(path, `names no channel; write {slack: "https://…"}, {webhook: "https://…"} or {service: "smtp://…"}`)
		case len(made) > 1:
			c.ProblemAt(path, "names two channels; write an entry for each")
		case seen[urlSum(made[0])]:
			c.ProblemAt(path, "repeats the URL of another channel")
		default:
			seen[urlSum(made[0])] = true
			c.Relay.Alerts.Channels = append(c.Relay.Alerts.Channels, made[0])
		}
	}
}

// urlSum returns what the name of a channel says of its URL, whatever its kind.
func urlSum(channel alert.Channel) string {
	return channel.Name()[strings.LastIndex(channel.Name(), "-"):]
}
