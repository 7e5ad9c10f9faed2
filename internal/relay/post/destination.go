package post

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/kafkapost"
	"github.com/outbox-relay/outbox-relay/internal/relay/natspost"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Defaults of the fields below.
const (
	DefaultTimeout      = 10 * time.Second
	DefaultLaneInFlight = 64
)

// A Destination is a named URL with its limits and secrets.
type Destination struct {
	// Name: lower-case letters, digits, '-' and '_', at most 63 characters.
	Name string
	// URL to send to, without user info and fragment. Its scheme decides how: http or https is
	// POSTed to; nats, or tls with TLS, names one or more servers of NATS, such as
	// "nats://a:4222,b:4222"; kafka, or kafka+ssl with TLS, brokers of Kafka.
	URL string
	// Timeout of one POST, from dialling to the end of the answer. 0: 10 s.
	Timeout time.Duration
	// MaxInFlight bounds concurrent POSTs to this destination. 0: 64.
	MaxInFlight int
	// RateLimit bounds the requests to this destination by this relay, per second. 0: any number.
	RateLimit float64
	// Retry says when, and how often. The zero value is the standard schedule.
	Retry policy.RetryPolicy
	// Breaker says when to hold what is due instead of spending attempts on a destination that is
	// down. The zero value is the standard one.
	Breaker policy.BreakerPolicy
	// OnFailure says what a delivery that failed for good does to the later ones of its ordering
	// key. Empty: [BlockFailed].
	OnFailure policy.FailurePolicy
	// Responses moves status codes to another outcome than the standard table gives them.
	Responses policy.Responses
	// Headers sent with every POST, such as Authorization. They may not repeat a header of the wire
	// contract.
	Headers map[string]string
	// SigningSecrets, each used for its own signature: more than one while rotating. Empty:
	// requests are unsigned.
	SigningSecrets []webhook.Secret
	// Batch says whether events may share a request of HTTP.
	Batch Batch
	// Wire says what requests look like and how they travel.
	Wire Wire
	// NATS is what only a destination with a URL of nats or tls has.
	NATS natspost.Settings
	// Kafka is what only a destination with a URL of kafka or kafka+ssl has.
	Kafka kafkapost.Settings
}

// WithDefaults returns a copy in which every zero value is replaced by its default, and with the
// egress of the configuration.
func (d Destination) WithDefaults(e Egress) Destination {
	d.Timeout = cmp.Or(d.Timeout, DefaultTimeout)
	d.MaxInFlight = cmp.Or(d.MaxInFlight, DefaultLaneInFlight)
	d.Wire = d.Wire.withDefaults(e)
	d.Retry = d.Retry.WithDefaults()
	d.Breaker = d.Breaker.WithDefaults()
	d.OnFailure = cmp.Or(d.OnFailure, policy.BlockFailed)
	return d
}

var (
	headerName = regexp.MustCompile("^[-!#$%&'*+.^_`|~0-9A-Za-z]+$")
	// hostName is a name as DNS knows it. A last label of digits would be an IPv4 address in one of
	// its many spellings (127.1, 0x7f000001), which resolvers disagree about.
	hostName  = regexp.MustCompile(`^([A-Za-z0-9_]([-A-Za-z0-9_]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z0-9_]([-A-Za-z0-9_]{0,61}[A-Za-z0-9_])?\.?$`)
	digitHost = regexp.MustCompile(`(?i)(^|\.)([0-9]+|0x[0-9a-f]*)\.?$`)
)

// Problems returns the mistakes in a destination with its defaults.
func (d Destination) Problems(path string) []check.Problem {
	var v check.Problems
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
	v.Add(d.wireProblems(path))
	v.Add(d.batchProblems(path))
	v.Add(d.schemeProblems(path))
	canonical := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(d.Headers)) {
		if text := headerProblem(name, d.Headers[name]); text != "" {
			v.Require(false, path+".headers."+name, "%s", text)
		}
		v.Require(!canonical[webhook.SentName(name)], path+".headers."+name, "stands twice; upper and lower case make no difference")
		canonical[webhook.SentName(name)] = true
	}
	return v
}

const urlExample = "write one such as https://logistics.internal/webhooks/finance"

// Names returns the names of destinations, in their order.
func Names(destinations []Destination) (names []string) {
	for _, d := range destinations {
		names = append(names, d.Name)
	}
	return names
}

// urlProblem says what is wrong with a destination's URL; empty: nothing. It repeats nothing that
// may be a credential, which with an '@' is also what stands where a scheme or a port belongs:
// user:secret@host, http://user:4242/x@host.
func urlProblem(raw string, e Egress) string {
	const example = urlExample
	if raw == "" {
		return "is empty; " + example
	}
	if len(raw) > 2048 {
		return fmt.Sprintf("has %d bytes; at most 2048 are allowed", len(raw))
	}
	if isLog(schemeOf(raw)) {
		return serversProblem(raw, e)
	}
	u, err := url.Parse(raw)
	if err != nil {
		return "cannot be parsed; " + example
	}
	host := u.Hostname()
	address, addressErr := netip.ParseAddr(host)
	switch {
	case u.Scheme != "http" && u.Scheme != "https" && strings.Contains(raw, "@"):
		return "does not begin with " + supportedSchemes + "; " + example
	case u.Scheme != "http" && u.Scheme != "https":
		return fmt.Sprintf("scheme %q is not supported; it may be %s: %s", u.Scheme, supportedSchemes, example)
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
	case addressErr == nil && Egress{}.Guard(address) != nil:
		return fmt.Sprintf("address %s is never dialled: it is link-local, a cloud's metadata service, or otherwise not a host's own", address)
	case addressErr == nil && e.Guard(address) != nil:
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
	case !plain.IsASCII(value):
		return "has a value with characters beyond printable ASCII"
	case webhook.Reserved(name):
		return "is set by the relay or by HTTP itself; remove it"
	}
	return ""
}
