package post

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A Wire says what the requests to a destination look like and how they travel. The zero value: raw
// events of any size, TLS 1.2 or later against the system's authorities, no credential of its own,
// the proxy of [Egress].
type Wire struct {
	// Format of the requests. Empty: [FormatRaw].
	Format Format
	// Source is the ce-source of CloudEvents, a URI reference that names the producing service.
	// Source and id together identify an event at its receiver, so relays of one database need the
	// same, and databases different ones. Required by [FormatCloudEvents].
	Source string
	// EventHeaders are the headers that events may set: names, and prefixes that end with a star.
	// Others are dropped, and counted in [policy.Result]. nil: [webhook.DefaultEventHeaders].
	EventHeaders []string
	// MaxPayloadBytes above which an event is failed instead of sent. 0: as much as the outbox
	// takes.
	MaxPayloadBytes int64
	// Excerpts says what of the body of a refusal is kept for operators. Empty: [ExcerptsProblem].
	Excerpts Excerpts
	// Authorization returns the value of that header. It is called for every request, from many
	// goroutines, so that what it returns may change; it must return at once. It excludes an
	// Authorization among the destination's headers. nil: there is none.
	Authorization func() string
	// TLS of https destinations.
	TLS TLS
	// Proxy instead of that of [Egress]; [NoProxy]: none. Empty: that of Egress.
	Proxy string

	egress Egress // of the configuration
}

// Format is how an event is expressed as a request.
type Format string

const (
	// FormatRaw: the payload as the body, everything else in headers of the outbox's own.
	FormatRaw Format = "raw"
	// FormatCloudEvents adds the headers of CloudEvents 1.0 in binary mode.
	FormatCloudEvents Format = "cloudevents"
)

// withDefaults returns a copy in which what a configuration as a whole decides has been decided.
func (w Wire) withDefaults(e Egress) Wire {
	w.Format = cmp.Or(w.Format, FormatRaw)
	w.Excerpts = cmp.Or(w.Excerpts, ExcerptsProblem)
	w.egress = e
	return w
}

// wireProblems returns the mistakes in a destination's Wire.
func (d Destination) wireProblems(path string) []check.Problem {
	var v check.Problems
	w := d.Wire
	v.Require(w.Format == FormatRaw || w.Format == FormatCloudEvents, path+".format", "%q is not known; write raw or cloudevents", w.Format)
	v.Require(w.MaxPayloadBytes >= 0, path+".max_payload_bytes", "%d is negative; write a number of bytes, or 0 for no limit of its own", w.MaxPayloadBytes)
	v.Require(w.Excerpts == ExcerptsProblem || w.Excerpts == ExcerptsText || w.Excerpts == ExcerptsNone, path+".excerpts", "%q is not known; write problem, text or none", w.Excerpts)
	for i, pattern := range w.EventHeaders {
		name := strings.TrimSuffix(pattern, "*")
		v.Require(headerName.MatchString(name) && !strings.Contains(name, "*") && !webhook.ReservedForEvents(pattern), fmt.Sprintf("%s.event_headers[%d]", path, i),
			"%q is no header that events may set; write a name such as x-tenant, or a prefix such as x-event-*", pattern)
	}
	if w.Format == FormatCloudEvents {
		v.Require(w.Source != "", path+".cloudevents.source", `is not set, and with an event's id it is what receivers of CloudEvents know the event by; write the URI of the producing service, such as "https://finance.internal/outbox"`)
	}
	if w.Source != "" {
		_, err := url.Parse(w.Source)
		v.Require(err == nil && plain.IsASCII(w.Source) && !strings.ContainsAny(w.Source, " \"<>\\^`{|}") && len(w.Source) <= 1024, path+".cloudevents.source",
			`is not a URI reference; write one such as "https://finance.internal/outbox" or "/finance/outbox"`)
	}
	switch w.TLS.MinVersion {
	case 0, tls.VersionTLS12, tls.VersionTLS13:
	default:
		v.Require(false, path+".tls.min_version", "is not supported; write 1.2 or 1.3")
	}
	if name := w.TLS.ServerName; name != "" {
		v.Require(hostName.MatchString(name) && len(name) <= 253, path+".tls.server_name", "%q is neither a DNS name nor an IPv4 address", name)
	}
	if w.Proxy != "" && w.Proxy != NoProxy {
		if text := proxyProblem(w.Proxy, w.egress); text != "" {
			v.Require(false, path+".proxy", "%s", text)
		}
	}
	for name := range d.Headers {
		canonical := webhook.SentName(name)
		v.Require(w.Authorization == nil || canonical != "Authorization", path+".headers."+name, "is set beside a credential, which goes into the same header; remove one of them")
		v.Require(w.Format != FormatCloudEvents || !isAttribute(canonical), path+".headers."+name, "is set by format cloudevents; remove it")
	}
	return v
}

// proxy returns what http.Transport asks for the proxy of a request; nil: there is none.
func (w Wire) proxy() (func(*http.Request) (*url.URL, error), error) {
	u, err := w.proxyURL()
	if u == nil {
		return nil, err
	}
	return http.ProxyURL(u), nil
}

// ProxyOf returns the proxy of a request; nil: there is none. It is what http.Transport asks.
func (e Egress) ProxyOf(*http.Request) (*url.URL, error) { return Wire{egress: e}.proxyURL() }

// proxyURL returns the URL of the proxy; nil: there is none.
func (w Wire) proxyURL() (*url.URL, error) {
	raw := cmp.Or(w.Proxy, w.egress.Proxy)
	if raw == "" || raw == NoProxy {
		return nil, nil
	}
	u, err := url.Parse(raw)
	if err != nil {
		return nil, fmt.Errorf("parse the proxy's url") // which may hold a password
	}
	return u, nil
}

// Follows reports whether something of the requests to a destination changes by itself.
func (d Destination) Follows() bool {
	return d.Wire.Authorization != nil || d.Wire.TLS.Roots != nil || d.Wire.TLS.Certificate != nil || d.NATS.Credentials != nil || d.NATS.Seed != nil
}
