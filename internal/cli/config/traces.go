package config

import (
	"net/url"
	"reflect"
	"regexp"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// Traces holds the settings of section traces.
type Traces struct {
	Endpoint    *url.URL          // nil: none
	Headers     map[string]string // for the collector; their values are secret
	ServiceName string
	SampleRatio float64
}

// Equal reports whether nothing that is read from the configuration differs.
func (a Traces) Equal(b Traces) bool {
	return reflect.DeepEqual(a, b)
}

// tracesRows are set by the variables that OpenTelemetry names, too, since operators set them for
// all of a pod's programs.
func (c *Config) tracesRows() []settings.Row {
	t := &c.Traces
	return []settings.Row{
		{Path: "traces.endpoint", Or: "OTEL_EXPORTER_OTLP_ENDPOINT", Value: settings.One("http://127.0.0.1:4318", orNone(parseTracesEndpoint), t.setEndpoint, "none")},
		{Path: "traces.headers.*", Or: "OTEL_EXPORTER_OTLP_HEADERS", FromFile: true, Split: parseTraceHeaders, Value: settings.Each("Bearer …", settings.ParseSecret, headersTo(&t.Headers))},
		{Path: "traces.service_name", Or: "OTEL_SERVICE_NAME", Value: settings.One("billing-relay", settings.ParseText, settings.To(&t.ServiceName), "outbox-relay")},
		{Path: "traces.sample_ratio", Value: settings.One("0.1", parseShare, settings.To(&t.SampleRatio), 1)},
	}
}

// tracesPath is what the protocol appends to an endpoint.
const tracesPath = "/v1/traces"

// parseTracesEndpoint parses the URL of a collector, or none. Like OTEL_EXPORTER_OTLP_ENDPOINT it
// may end before tracesPath.
func parseTracesEndpoint(text string) (endpoint, problem string) {
	if text == "" || text == "none" {
		return "none", ""
	}
	u, err := url.Parse(text)
	switch {
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		return "", `is not the URL of a collector; write one such as "http://127.0.0.1:4318", or none` // it may hold a credential
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return "", "holds a user, a query or a fragment; write the URL without it, and credentials into traces.headers"
	}
	return text, ""
}

// setEndpoint takes what parseTracesEndpoint returns.
func (a *Traces) setEndpoint(text string) {
	if text == "none" {
		return
	}
	a.Endpoint, _ = url.Parse(text)
	if !strings.HasSuffix(a.Endpoint.Path, tracesPath) {
		a.Endpoint = a.Endpoint.JoinPath(tracesPath)
	}
}

var headerName = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")

// parseTraceHeaders parses headers as OTEL_EXPORTER_OTLP_HEADERS writes them: name=value, separated
// by commas, with % and two digits for signs that are not themselves.
func parseTraceHeaders(text string) (headers map[string]string, problem string) {
	headers = map[string]string{}
	for pair := range strings.SplitSeq(text, ",") {
		name, value, found := strings.Cut(pair, "=")
		name = strings.TrimSpace(name)
		plain, err := url.PathUnescape(strings.TrimSpace(value))
		_, problem := settings.ParseText(plain)
		if !found || !headerName.MatchString(name) || err != nil || problem != "" {
			return nil, `is not a list of headers; write name=value, several separated by commas, such as "Authorization=Bearer%20…"`
		}
		headers[name] = plain
	}
	return headers, ""
}

func (c *Config) checkTraces() {
	for name := range c.Traces.Headers {
		if !headerName.MatchString(name) {
			c.ProblemAt("traces.headers."+name, "is not a name that a header can have")
		}
	}
}

// parseShare parses a number from 0 to 1.
func parseShare(text string) (float64, string) {
	share, problem := settings.ParseFraction("write one from 0 to 1")(text)
	if problem == "" && (share < 0 || share > 1) {
		problem = settings.Quote(text) + " is out of range; write a number from 0 to 1"
	}
	return share, problem
}
