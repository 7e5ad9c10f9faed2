package relay

import (
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// Defaults of the fields below.
const (
	DefaultPollInterval = 5 * time.Second
	DefaultLease        = 60 * time.Second
	DefaultDrainTimeout = 20 * time.Second
	DefaultMaxInFlight  = 256
	DefaultTimeout      = 10 * time.Second
	DefaultLaneInFlight = 64
	DefaultAlertWindow  = 15 * time.Minute
)

// leaseMargin is by how much a lease must outlast the longest timeout: the time to settle what the POST yielded.
const leaseMargin = 5 * time.Second

// Config is what a Relay needs. Only Pool and Destinations have no usable zero value.
type Config struct {
	// Pool says how to reach the producer's database. The relay opens at most MaxConns connections of it (when that is
	// 0 or above 3: three), and one more for its session. It overrides the planner settings on which its plans rest.
	Pool *pgxpool.Config
	// Pooler says whether Pool leads through a connection pooler. The zero value finds out.
	Pooler Pooler
	// Schema that holds the outbox tables. Empty: the first one on the search_path of role and database.
	Schema string

	// Name under which operators see this relay. Empty: the host's name.
	Name string
	// Version of the program, shown beside the name. May be empty.
	Version string

	// Environment is the name of where this relay belongs, such as "production". The first one that a relay names is
	// remembered in the database; a relay of another name does nothing there (see Hooks.Quarantined). Empty: not compared.
	// Printable ASCII, at most 63 characters.
	Environment string

	// PollInterval is how long an idle relay waits before it looks by itself; notifications, its own activity and retries
	// that it has put off by less than ten minutes wake it sooner. 0: 5 s. At least 1 s.
	PollInterval time.Duration
	// Lease bounds how long a claim holds when its relay can neither settle nor be seen dead. 0: 60 s. It must be at
	// least 5 s longer than every destination's timeout, or two relays could POST one delivery at the same time.
	Lease time.Duration
	// DrainTimeout bounds how long Run, once told to stop, waits for POSTs in flight. 0: 20 s.
	DrainTimeout time.Duration
	// MaxInFlight bounds concurrent POSTs over all destinations; lanes with work share it evenly, and each always may
	// have one. 0: 256.
	MaxInFlight int

	// Destinations, at least one. Names are unique.
	Destinations []Destination
	// Routes decide which event types go where, together with those of the other relays that live. Empty: every type goes
	// to every destination.
	Routes []Route

	// Egress says where requests may go, and through what.
	Egress Egress

	// Alerts says whom to tell when something needs a person. The zero value only logs.
	Alerts Alerts
	// Watching says how this relay looks after the database it is a guest of. The zero value is fine.
	Watching Watching
	// LogDelivered adds successful attempts to the attempt log, which otherwise holds only those that did not deliver.
	// It costs one more inserted row per delivery.
	LogDelivered bool

	// Retention says for how long what is done with is kept. The zero value keeps everything.
	Retention Retention

	// Log receives what happens, never payloads, secrets, or URLs with credentials. Its fields hold text that others wrote;
	// zerolog escapes its control characters below U+0020 only, see [plain.Line]. The zero value discards.
	Log zerolog.Logger
	// Hooks observe the relay. The zero value observes nothing.
	Hooks Hooks
}

// Pooler says whether a connection pooler stands between the relay and its database. The zero value finds out.
type Pooler struct {
	// Mode says what Config.Pool leads to. Empty: PoolerAuto.
	Mode PoolerMode
	// Session is how to reach the server itself when Config.Pool leads through a pooler. The relay opens one connection
	// of it, and is with it what it is without a pooler: woken by notifications, rescued within about a second. nil: as
	// Config.Pool.
	Session *pgxpool.Config
}

// PoolerMode says what a database URL leads to.
type PoolerMode string

// What a database URL may lead to.
const (
	// PoolerAuto asks the server whether it got the settings of a session, and works as PoolerTransaction if it did not.
	PoolerAuto PoolerMode = "auto"
	// PoolerNone is the server itself. A relay that finds a pooler there ends with ErrPooler.
	PoolerNone PoolerMode = "none"
	// PoolerTransaction is a pooler that keeps nothing but transactions, as PgBouncer does. Without Pooler.Session, events
	// are found by polling alone, and the work of a relay that crashed waits for its lease.
	PoolerTransaction PoolerMode = "transaction"
)

func (v *validator) pooler(p Pooler) {
	known := []PoolerMode{"", PoolerAuto, PoolerNone, PoolerTransaction}
	v.Require(slices.Contains(known, p.Mode), "database.pooler", "%q is not known; write auto, none or transaction", p.Mode)
}

// A Destination is a named URL with its limits and secrets.
type Destination struct {
	// Name: lower-case letters, digits, '-' and '_', at most 63 characters.
	Name string
	// URL to POST to: absolute, http or https, without user info and fragment.
	URL string
	// Timeout of one POST, from dialling to the end of the answer. 0: 10 s.
	Timeout time.Duration
	// MaxInFlight bounds concurrent POSTs to this destination. 0: 64.
	MaxInFlight int
	// RateLimit bounds the requests to this destination by this relay, per second. 0: any number.
	RateLimit float64
	// Retry says when, and how often. The zero value is the standard schedule.
	Retry policy.RetryPolicy
	// Breaker says when to hold what is due instead of spending attempts on a destination that is down. The zero value
	// is the standard one.
	Breaker policy.BreakerPolicy
	// OnFailure says what a delivery that failed for good does to the later ones of its ordering key. Empty:
	// [BlockFailed].
	OnFailure policy.FailurePolicy
	// Responses moves status codes to another outcome than the standard table gives them.
	Responses policy.Responses
	// Headers sent with every POST, such as Authorization. They may not repeat a header of the wire contract.
	Headers map[string]string
	// SigningSecrets, each used for a signature of its own: more than one while rotating. Empty: requests are unsigned.
	SigningSecrets []webhook.Secret
	// Wire says what requests look like and how they travel.
	Wire Wire
}

// A Route sends the event types that match Event to the destinations in To.
type Route struct {
	// Event is an event type in which '*' stands for any characters: "*", "invoice.*".
	Event string
	// To names destinations.
	To []string
}

// A Problem is one mistake in a Config: the path of the setting, and what is wrong with it.
type Problem = check.Problem

// withDefaults returns a copy in which every zero value is replaced by its default.
func (c Config) withDefaults() Config {
	setDefault(&c.PollInterval, DefaultPollInterval)
	setDefault(&c.Lease, DefaultLease)
	setDefault(&c.DrainTimeout, DefaultDrainTimeout)
	setDefault(&c.MaxInFlight, DefaultMaxInFlight)
	c.Alerts = c.Alerts.withDefaults()
	c.Watching = c.Watching.withDefaults()
	c.Destinations = append([]Destination(nil), c.Destinations...)
	for i := range c.Destinations {
		d := &c.Destinations[i]
		setDefault(&d.Timeout, DefaultTimeout)
		setDefault(&d.MaxInFlight, DefaultLaneInFlight)
		d.Wire = d.Wire.withDefaults(c.Egress)
		d.Retry = d.Retry.WithDefaults()
		d.Breaker = d.Breaker.WithDefaults()
		setDefault(&d.OnFailure, policy.BlockFailed)
	}
	if len(c.Routes) == 0 {
		all := Route{Event: "*"}
		for _, d := range c.Destinations {
			all.To = append(all.To, d.Name)
		}
		c.Routes = []Route{all}
	}
	return c
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Validate returns every mistake in the configuration, none if it can run. It does not look at Pool.
func (c Config) Validate() []Problem {
	c = c.withDefaults()
	var v validator
	v.pooler(c.Pooler)
	v.Require(storable(c.Schema), "database.schema", "is not valid UTF-8, or contains a NUL")
	v.Require(storable(c.Name), "relay.name", "is not valid UTF-8, or contains a NUL")
	v.Require(storable(c.Version), "relay.version", "is not valid UTF-8, or contains a NUL")
	if text := environmentProblem(c.Environment); text != "" {
		v.Require(false, "environment", "%s", text)
	}
	v.Require(c.PollInterval >= time.Second, "relay.poll_interval", "%s is too short; write at least 1s", c.PollInterval)
	v.Require(c.DrainTimeout > 0, "relay.drain_timeout", "%s is negative; write a duration such as 20s", c.DrainTimeout)
	v.Require(c.MaxInFlight > 0 && c.MaxInFlight <= 100_000, "relay.max_in_flight", "%d is out of range; write 1 to 100000", c.MaxInFlight)
	v.alerts(c.Alerts)
	v.Require(len(c.Destinations) > 0, "destinations", "there is none; set OUTBOX_DESTINATION_URL or add one")

	v.egress(c.Egress)

	names := map[string]bool{}
	for _, d := range c.Destinations {
		path := "destinations." + d.Name
		v.Require(destinationName.MatchString(d.Name), path,
			"the name %q is not usable; write lower-case letters, digits, '-' and '_', starting with a letter or digit, at most 63", d.Name)
		v.Require(!names[d.Name], path, "the name is used twice")
		names[d.Name] = true
		before := len(v.Problems)
		v.destination(path, d)
		v.Require(c.Lease >= d.Timeout+leaseMargin, "relay.lease",
			"%s must be at least %s longer than %s.timeout (%s); write %s or more, or lower the timeout",
			c.Lease, leaseMargin, path, d.Timeout, d.Timeout+leaseMargin)
		if len(v.Problems) == before { // or the comparison would be of nonsense
			v.promise(path, d, c.Lease)
		}
	}
	for i, r := range c.Routes {
		path := fmt.Sprintf("routes[%d]", i)
		v.Require(routePattern.MatchString(r.Event), path+".event",
			"%q is not an event type or pattern; write one such as \"invoice.paid\", \"invoice.*\" or \"*\"", r.Event)
		v.Require(len(r.To) > 0, path+".to", "names no destination")
		for _, name := range r.To {
			v.Require(names[name], path+".to", "there is no destination %q", name)
		}
	}
	v.retention(c)
	return v.Problems
}

var (
	destinationName = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)
	routePattern    = regexp.MustCompile(`^[\x21-\x7e]{1,255}$`)
	headerName      = regexp.MustCompile("^[-!#$%&'*+.^_`|~0-9A-Za-z]+$")
	// hostName is a name as DNS knows it. A last label of digits would be an IPv4 address in one of its many
	// spellings (127.1, 0x7f000001), which resolvers disagree about.
	hostName  = regexp.MustCompile(`^([A-Za-z0-9_]([-A-Za-z0-9_]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z0-9_]([-A-Za-z0-9_]{0,61}[A-Za-z0-9_])?\.?$`)
	digitHost = regexp.MustCompile(`(?i)(^|\.)([0-9]+|0x[0-9a-f]*)\.?$`)
)

type validator struct{ check.Problems }

// storable reports whether PostgreSQL takes s as a text. A relay with another name would wait for ever to be registered.
func storable(s string) bool { return utf8.ValidString(s) && !strings.Contains(s, "\x00") }

func (v *validator) destination(path string, d Destination) {
	if text := urlProblem(d.URL, d.Wire.egress); text != "" {
		v.Require(false, path+".url", "%s", text)
	}
	v.Require(d.Timeout > 0, path+".timeout", "%s is negative; write a duration such as 10s", d.Timeout)
	v.Require(d.MaxInFlight > 0 && d.MaxInFlight <= 10_000, path+".max_in_flight", "%d is out of range; write 1 to 10000", d.MaxInFlight)
	v.Require(d.RateLimit >= 0 && d.RateLimit <= 1e6 && (d.RateLimit == 0 || d.RateLimit >= 0.01), path+".rate_limit",
		"%g is out of range; write requests per second, 0.01 to 1000000, or 0 for no limit", d.RateLimit)
	v.Require(d.OnFailure == policy.BlockFailed || d.OnFailure == policy.SkipFailed, path+".on_failure", "%q is not known; write block or skip", d.OnFailure)
	v.Add(d.Breaker.Problems(path + ".breaker"))
	v.Add(d.Retry.Problems(path + ".retry"))
	v.Add(d.Responses.Problems(path + ".responses"))
	v.wire(path, d)
	canonical := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(d.Headers)) {
		if text := headerProblem(name, d.Headers[name]); text != "" {
			v.Require(false, path+".headers."+name, "%s", text)
		}
		v.Require(!canonical[http.CanonicalHeaderKey(name)], path+".headers."+name, "stands twice; upper and lower case make no difference")
		canonical[http.CanonicalHeaderKey(name)] = true
	}
}

// promise reports a promise that is shorter than what the destination's own schedule may take.
func (v *validator) promise(path string, d Destination, lease time.Duration) {
	least := d.Retry.HorizonWith(d.Timeout, lease)
	v.Require(d.Retry.Promise >= least, path+".retry.horizon",
		"%s is shorter than schedule, max_attempts, retry_after_max, timeout and lease may take (%s), so that deliveries would fail before their last attempt; write %.0fh or more, or shorten those",
		d.Retry.Promise, least, math.Ceil(least.Hours()))
}

// urlProblem says what is wrong with a destination's URL; empty: nothing. It repeats nothing that may be a credential,
// which with an '@' is also what stands where a scheme or a port belongs: user:secret@host, http://user:4242/x@host.
func urlProblem(raw string, e Egress) string {
	const example = "write one such as https://logistics.internal/webhooks/finance"
	if raw == "" {
		return "is empty; " + example
	}
	if len(raw) > 2048 {
		return fmt.Sprintf("has %d bytes; at most 2048 are allowed", len(raw))
	}
	u, err := url.Parse(raw)
	if err != nil {
		return "cannot be parsed; " + example
	}
	host := u.Hostname()
	address, addressErr := netip.ParseAddr(host)
	switch {
	case u.Scheme != "http" && u.Scheme != "https" && strings.Contains(raw, "@"):
		return "does not begin with http:// or https://; " + example
	case u.Scheme != "http" && u.Scheme != "https":
		return fmt.Sprintf("scheme %q is not supported; %s", u.Scheme, example)
	case u.User != nil:
		return "contains user info; move it to headers.Authorization"
	case u.Fragment != "" || strings.Contains(raw, "#"):
		return "contains a fragment (#…), which is never sent; remove it"
	case host == "":
		return "has no host; " + example
	case strings.ContainsAny(raw, "{}"):
		return "contains a template; a destination has one fixed URL"
	case addressErr == nil && address.Zone() != "":
		return "has an address with a zone; write it without"
	case addressErr == nil && Egress{}.guard(address) != nil:
		return fmt.Sprintf("address %s is never dialled: it is link-local, a cloud's metadata service, or otherwise not a host's own", address)
	case addressErr == nil && e.guard(address) != nil:
		return fmt.Sprintf("address %s is private and not within egress.allow_private", address)
	case addressErr != nil && (!hostName.MatchString(host) || digitHost.MatchString(host) || len(host) > 253):
		return fmt.Sprintf("host %q is neither a DNS name nor an IP address in its usual spelling", host)
	}
	if port := u.Port(); port != "" {
		if _, err := netip.ParseAddrPort("127.0.0.1:" + port); err != nil || port == "0" {
			if strings.Contains(raw, "@") {
				return "has a port out of range; write 1 to 65535, and '@' in a path as %40"
			}
			return fmt.Sprintf("port %s is out of range; write 1 to 65535", port)
		}
	} else if strings.HasSuffix(u.Host, ":") {
		return "has a colon but no port"
	}
	return ""
}

// headerProblem says why a header cannot be sent; empty: it can.
func headerProblem(name, value string) string {
	switch {
	case !headerName.MatchString(name):
		return "is not a header name (letters, digits and hyphens)"
	case len(name)+len(value) > 8192:
		return "is longer than 8192 bytes"
	case !printableASCII(value):
		return "has a value with characters beyond printable ASCII"
	case webhook.Reserved(name):
		return "is set by the relay or by HTTP itself; remove it"
	}
	return ""
}
