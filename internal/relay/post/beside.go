package post

import (
	"net/http"
	"net/url"
)

// Beside returns what carries requests to a URL of a destination's receiver beside its deliveries:
// under the same egress, through the same proxy, with the same TLS settings. The caller closes its
// idle connections.
func Beside(d Destination, e Egress, u *url.URL) (*http.Transport, error) {
	d = d.WithDefaults(e)
	proxy, err := d.Wire.proxy()
	if err != nil {
		return nil, err
	}
	return &http.Transport{
		DialContext:            e.Dialer(d.Timeout).DialContext,
		Proxy:                  proxy,
		OnProxyConnectResponse: ProxyRefusal,
		TLSClientConfig:        d.Wire.TLS.config(u.Hostname()),
		TLSHandshakeTimeout:    d.Timeout,
		MaxResponseHeaderBytes: maxResponseHeader,
	}, nil
}
