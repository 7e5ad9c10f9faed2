package relay

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/relay/identity"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// Defaults of the fields below.
const (
	DefaultPollInterval = 5 * time.Second
	DefaultLease        = 60 * time.Second
	DefaultDrainTimeout = 20 * time.Second
	DefaultMaxInFlight  = 256
)

// leaseMargin is by how much a lease must outlast the longest timeout: the time to settle what the
// POST yielded.
const leaseMargin = 5 * time.Second

// longestLease is less than what pg.IsFree takes for a lease.
const longestLease = 24 * time.Hour

// Config is what a Relay needs. Only Pool and Destinations have no usable zero value.
type Config struct {
	// Pool says how to reach the producer's database. The relay opens at most MaxConns connections
	// of it (when that is 0 or above 3: three), and one more for its session. It overrides the
	// planner settings on which its plans rest.
	Pool *pgxpool.Config
	// Pooler says whether Pool leads through a connection pooler. The zero value finds out.
	Pooler Pooler
	// Schema that holds the outbox tables. Empty: the first one on the search_path of role and
	// database.
	Schema string
	// AllowSuperuser lets Run work with a superuser's login where other logins may connect to the
	// database, too. Without it Run ends with [ErrSuperuser] there.
	AllowSuperuser bool

	// Name under which operators see this relay. Empty: the host's name.
	Name string
	// Version of the program, shown beside the name. May be empty.
	Version string

	// Environment is the name of where this relay belongs, such as "production". The first one that
	// a relay names is remembered in the database; a relay of another name does nothing there (see
	// Hooks.Quarantined). Empty: not compared. Printable ASCII, at most 63 characters.
	Environment string

	// Entry is the name of this outbox among those that one process serves, for alerts. Empty: it
	// is the only one.
	Entry string

	// PollInterval is how long an idle relay waits before it looks by itself; notifications, its
	// own activity and retries that it has put off by less than ten minutes wake it sooner. 0: 5 s.
	// At least 1 s.
	PollInterval time.Duration
	// Lease bounds how long a claim holds when its relay can neither settle nor be seen dead. 0: 60
	// s. At most 24 hours, and at least 5 s longer than every destination's timeout, or two relays
	// could POST one delivery at the same time.
	Lease time.Duration
	// DrainTimeout bounds how long Run, once told to stop, waits for POSTs in flight. 0: 20 s.
	DrainTimeout time.Duration
	// MaxInFlight bounds concurrent POSTs over all destinations; lanes with work share it evenly,
	// and each always may have one. A lane that is held takes only its probe. 0: 256.
	MaxInFlight int

	// SleepAfter is how long there must have been nothing to do for Run to end with [Asleep]. 0: it
	// never does.
	SleepAfter time.Duration
	// Resume is the registration of a relay that fell asleep, with which this one begins. 0: it
	// gets its own registration.
	Resume int32

	// Destinations, at least one. Names are unique.
	Destinations []Destination
	// Routes decide which event types go where, together with those of the other relays that live.
	// Empty: every type goes to every destination.
	Routes []Route

	// Egress says where requests may go, and through what.
	Egress Egress

	// Alerts says whom to tell when something needs a person. The zero value only logs.
	Alerts Alerts
	// Watching says how this relay looks after the database it is a guest of. The zero value is
	// fine.
	Watching Watching
	// LogDelivered adds successful attempts to the attempt log, which otherwise holds only those
	// that did not deliver. It costs one more inserted row per delivery.
	LogDelivered bool

	// History counts what this relay does, and Run adds it to the database each minute. Others may
	// read it too. Nil: there is none.
	History *History

	// Retention says for how long what is done with is kept. The zero value keeps everything.
	Retention Retention

	// Log receives what happens, never payloads, secrets, or URLs with credentials. Its fields hold
	// text that others wrote; zerolog escapes its control characters below U+0020 only, see
	// [plain.Line]. The zero value discards.
	Log zerolog.Logger
	// Hooks observe the relay. The zero value observes nothing.
	Hooks Hooks
	// Spans makes a span of every attempt, whose trace context the request carries. nil: there are
	// none, and requests carry the producer's trace context.
	Spans *Spans
}

// withDefaults returns a copy in which every zero value is replaced by its default.
func (c Config) withDefaults() Config {
	c.PollInterval = cmp.Or(c.PollInterval, DefaultPollInterval)
	c.Lease = cmp.Or(c.Lease, DefaultLease)
	c.DrainTimeout = cmp.Or(c.DrainTimeout, DefaultDrainTimeout)
	c.MaxInFlight = cmp.Or(c.MaxInFlight, DefaultMaxInFlight)
	c.Alerts = c.Alerts.WithDefaults()
	c.Watching = c.Watching.WithDefaults()
	c.Destinations = append([]post.Destination(nil), c.Destinations...)
	for i := range c.Destinations {
		c.Destinations[i] = c.Destinations[i].WithDefaults(c.Egress)
	}
	if len(c.Routes) == 0 {
		c.Routes = []Route{{Event: "*", To: post.Names(c.Destinations)}}
	}
	return c
}

// Validate returns every mistake in the configuration, none if it can run. It does not look at
// Pool.
func (c Config) Validate() []Problem {
	c = c.withDefaults()
	var v validator
	v.Add(c.Pooler.Problems("database.pooler"))
	v.Require(storable(c.Schema), "database.schema", "is not valid UTF-8, or contains a NUL")
	v.Require(storable(c.Name), "relay.name", "is not valid UTF-8, or contains a NUL")
	v.Require(storable(c.Version), "relay.version", "is not valid UTF-8, or contains a NUL")
	if text := identity.EnvironmentProblem(c.Environment); text != "" {
		v.Require(false, "environment", "%s", text)
	}
	v.Require(c.PollInterval >= time.Second, "relay.poll_interval", "%s is too short; write at least 1s", c.PollInterval)
	v.Require(c.SleepAfter == 0 || c.SleepAfter >= time.Second, "relay.sleep_after", "%s is too short; write at least 1s, or 0 for never", c.SleepAfter)
	v.Require(c.DrainTimeout > 0, "relay.drain_timeout", "%s is negative; write a duration such as 20s", c.DrainTimeout)
	v.Require(c.MaxInFlight > 0 && c.MaxInFlight <= 100_000, "relay.max_in_flight", "%d is out of range; write 1 to 100000", c.MaxInFlight)
	v.Add(c.Alerts.Problems("alerts"))
	v.Require(len(c.Destinations) > 0, "destinations", "there is none; set OUTBOX_DESTINATION_URL or add one")

	v.Add(c.Egress.Problems("egress"))

	v.Require(c.Lease <= longestLease, "relay.lease", "%s is too long; write %s or less", c.Lease, longestLease)
	names := map[string]bool{}
	for _, d := range c.Destinations {
		path := "destinations." + d.Name
		v.Require(destinationName.MatchString(d.Name), path,
			"the name %q is not usable; write lower-case letters, digits, '-' and '_', starting with a letter or digit, at most 63", d.Name)
		v.Require(!names[d.Name], path, "the name is used twice")
		names[d.Name] = true
		before := len(v.Problems)
		v.Add(d.Problems(path))
		v.Require(c.Lease >= d.Timeout+leaseMargin, "relay.lease",
			"%s must be at least %s longer than %s.timeout (%s); write %s or more, or lower the timeout",
			c.Lease, leaseMargin, path, d.Timeout, d.Timeout+leaseMargin)
		if len(v.Problems) == before { // or the comparison would be of nonsense
			v.promise(path, d, c.Lease)
		}
	}
	for i, r := range c.Routes {
		v.Add(r.Problems(fmt.Sprintf("routes[%d]", i), names))
	}
	v.Add(c.Retention.Problems("retention"))
	v.processedEvents(c)
	return v.Problems
}

// processedEvents comes last: what it compares with has been checked by then.
func (v *validator) processedEvents(c Config) {
	k := c.Retention
	if len(v.Problems) > 0 {
		return // the retry policies may be nonsense
	}
	var longest time.Duration
	var name string
	for _, d := range c.Destinations {
		if d.Retry.NotAfter > longest {
			longest, name = d.Retry.NotAfter, d.Name
		}
	}
	v.Require(k.ProcessedEvents == 0 || k.ProcessedEvents >= longest, "retention.processed_events",
		"%s is shorter than destinations.%s.retry.not_after (%s), until when a duplicate may come, and would be processed again; write %.0fh or more, or 0 for ever, or a shorter not_after",
		k.ProcessedEvents, name, longest, math.Ceil(longest.Hours()))
}

var destinationName = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)

type validator struct{ check.Problems }

// storable reports whether PostgreSQL takes s as a text. A relay with another name would wait for
// ever to be registered.
func storable(s string) bool { return utf8.ValidString(s) && !strings.Contains(s, "\x00") }

// promise reports a promise that is shorter than what the destination's own schedule may take.
func (v *validator) promise(path string, d post.Destination, lease time.Duration) {
	least := d.Retry.LongestWith(d.Timeout, lease)
	v.Require(d.Retry.NotAfter >= least, path+".retry.not_after",
		"%s is shorter than schedule, max_attempts, retry_after_max, timeout and lease may take (%s), so that deliveries would fail before their last attempt; write %.0fh or more, or shorten those",
		d.Retry.NotAfter, least, math.Ceil(least.Hours()))
}

// complete returns a configuration with its defaults, or every mistake in it as joined Problems.
func complete(cfg Config) (Config, error) {
	var mistakes check.Problems
	mistakes.Require(cfg.Pool != nil, "database.url", "is not set")
	mistakes.Add(cfg.Validate())
	if err := check.Join(mistakes); err != nil {
		return Config{}, err
	}
	cfg = cfg.withDefaults()
	if cfg.Name == "" {
		cfg.Name, _ = os.Hostname()
	}
	return cfg, nil
}
