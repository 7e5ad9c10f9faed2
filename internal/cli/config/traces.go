package config

import (
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// Traces holds the settings of section traces.
type Traces struct {
	Endpoint    *url.URL          // nil: off
	Headers     map[string]string // for the collector; their values are secret
	ServiceName string
	SampleRatio float64
}

// Equal reports whether nothing that is read from the configuration differs.
func (a Traces) Equal(b Traces) bool {
	return fmt.Sprint(a.Endpoint) == fmt.Sprint(b.Endpoint) && a.ServiceName == b.ServiceName && a.SampleRatio == b.SampleRatio &&
		maps.Equal(a.Headers, b.Headers)
}

// tracesRows are set by the variables that OpenTelemetry names, too, since operators set them for all of a pod's programs.
func (c *Config) tracesRows() []settings.Row {
	t := &c.Traces
	return []settings.Row{
		{Path: "traces.endpoint", Env: "TRACES_ENDPOINT", Or: "OTEL_EXPORTER_OTLP_ENDPOINT", Value: settings.One("http://127.0.0.1:4318", parseTracesEndpoint, func(e tracesEndpoint) { t.Endpoint = e.url }, tracesEndpoint{})},
		{Path: "traces.headers", Env: "TRACES_HEADERS", Or: "OTEL_EXPORTER_OTLP_HEADERS", FromFile: true, Value: settings.One("Authorization=Bearer%20…", parseTraceHeaders, func(h traceHeaders) { t.Headers = h.values })},
		{Path: "traces.service_name", Env: "TRACES_SERVICE_NAME", Or: "OTEL_SERVICE_NAME", Value: settings.One("billing-relay", settings.ParseText, settings.To(&t.ServiceName), "outbox-relay")},
		{Path: "traces.sample_ratio", Env: "TRACES_SAMPLE_RATIO", Value: settings.One("0.1", parseShare, settings.To(&t.SampleRatio), 1)},
	}
}

// A tracesEndpoint is where spans are sent. The zero value: nowhere.
type tracesEndpoint struct {
	text string // as it was written
	url  *url.URL
}

// Shown implements [settings.Shown].
func (e tracesEndpoint) Shown() string {
	if e.url == nil {
		return "off"
	}
	return e.text
}

// tracesPath is what the protocol appends to an endpoint.
const tracesPath = "/v1/traces"

// parseTracesEndpoint parses the URL of a collector, or off. Like OTEL_EXPORTER_OTLP_ENDPOINT it may end before tracesPath.
func parseTracesEndpoint(text string) (e tracesEndpoint, problem string) {
	if text == "" || text == "off" {
		return tracesEndpoint{}, ""
	}
	u, err := url.Parse(text)
	switch {
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		return e, `is not the URL of a collector; write one such as "http://127.0.0.1:4318", or off` // it may hold a credential
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return e, "holds a user, a query or a fragment; write the URL without it, and credentials into traces.headers"
	}
	if !strings.HasSuffix(u.Path, tracesPath) {
		u = u.JoinPath(tracesPath)
	}
	return tracesEndpoint{text, u}, ""
}

// traceHeaders are headers of requests to the collector. Their values are secret.
type traceHeaders struct {
	settings.Secret
	values map[string]string
}

// Shown implements [settings.Shown].
func (h traceHeaders) Shown() string {
	names := slices.Sorted(maps.Keys(h.values))
	for i := range names {
		names[i] += "=" + settings.Mask
	}
	return strings.Join(names, ",")
}

var headerName = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")

// parseTraceHeaders parses headers as OTEL_EXPORTER_OTLP_HEADERS writes them: name=value, separated by commas, with % and two
// digits for signs that are not themselves.
func parseTraceHeaders(text string) (h traceHeaders, problem string) {
	h = traceHeaders{Secret: settings.Secret(text), values: map[string]string{}}
	for pair := range strings.SplitSeq(text, ",") {
		name, value, found := strings.Cut(pair, "=")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		plain, err := url.PathUnescape(value)
		_, problem := settings.ParseText(plain)
		if !found || !headerName.MatchString(name) || err != nil || problem != "" {
			return traceHeaders{}, `is not a list of headers; write name=value, several separated by commas, such as "Authorization=Bearer%20…"`
		}
		h.values[name] = plain
	}
	return h, ""
}

// parseShare parses a number from 0 to 1.
func parseShare(text string) (float64, string) {
	share, problem := settings.ParseFraction("write one from 0 to 1")(text)
	if problem == "" && (share < 0 || share > 1) {
		problem = settings.Quote(text) + " is out of range; write a number from 0 to 1"
	}
	return share, problem
}
