package relay

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// An endpoint is where and how a lane's requests go: what all requests to a destination share. It is immutable once
// made, so that senders use it without a lock while another one takes its place; a certificate or credential that
// changes does so behind it.
type endpoint struct {
	destination Destination
	url         *url.URL
	transport   *http.Transport
	header      http.Header // the part of every request's header that never changes
}

// newEndpoint prepares the requests to a destination.
func newEndpoint(d Destination, version string) (*endpoint, error) {
	u, err := url.Parse(d.URL)
	if err != nil {
		return nil, fmt.Errorf("parse url of %s: %w", d.Name, err)
	}
	header := http.Header{
		"Content-Type": {"application/json"},
		"User-Agent":   {strings.TrimSuffix("outbox-relay/"+version, "/")},
	}
	for name, value := range d.Headers {
		header.Set(name, value)
	}
	return &endpoint{destination: d, url: u, transport: newTransport(d), header: header}, nil
}

func newTransport(d Destination) *http.Transport {
	return &http.Transport{
		DialContext:         guardedDialer(d.Timeout).DialContext,
		ForceAttemptHTTP2:   true,
		TLSHandshakeTimeout: d.Timeout,
		// One connection per POST in flight, all kept: the default of two would dial for nearly every POST.
		MaxIdleConns:           d.MaxInFlight,
		MaxIdleConnsPerHost:    d.MaxInFlight,
		IdleConnTimeout:        90 * time.Second,
		MaxResponseHeaderBytes: maxResponseHeader,
		// A few kilobytes of gzip can hold gigabytes.
		DisableCompression: true,
		Proxy:              nil,
	}
}
