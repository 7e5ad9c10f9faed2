package alert

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"

	"github.com/outbox-relay/outbox-relay/internal/relay/post"

	"github.com/outbox-relay/outbox-relay/internal/mask"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// Egress says where alert channels may be reached, and through what.
type Egress = post.Egress

// A Transport carries every alert. It dials no address that its [Egress] forbids, uses no proxy but
// that of Egress, follows no redirect, trusts the system's certificate authorities only, and bounds
// the time and the size of an answer. It keeps no connection, as alerts are rare. It is safe for
// concurrent use.
type Transport struct {
	egress Egress
	HTTP   *http.Transport
}

// maxAlertAnswer bounds what is read of a channel's answer, in bytes.
const maxAlertAnswer = 64 << 10

// NewTransport returns the transport of the alerts under an Egress.
func NewTransport(e Egress) *Transport {
	return &Transport{egress: e, HTTP: &http.Transport{
		DialContext:            e.Dialer(alertTimeout).DialContext,
		Proxy:                  e.ProxyOf,
		OnProxyConnectResponse: post.ProxyRefusal,
		TLSHandshakeTimeout:    alertTimeout,
		DisableKeepAlives:      true,
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxAlertAnswer,
	}}
}

// Exchange sends the request of a channel and returns the answer, as far as it is read. An answer
// other than 2xx is an error that repeats its beginning; a redirect is never followed. secrets are
// hidden in every error.
func (t *Transport) Exchange(req *http.Request, secrets *mask.Mask) ([]byte, error) {
	status, answer, err := t.exchange(req)
	if err != nil {
		return nil, fmt.Errorf("send alert: %s", plain.Clip(secrets.Hide(err.Error(), false)))
	}
	if status < 200 || status > 299 {
		excerpt := plain.Shorten(secrets.Hide(string(answer), len(answer) == maxAlertAnswer), mask.MaxExcerpt)
		return nil, fmt.Errorf("send alert: the channel answered %d %s: %s", status, http.StatusText(status), plain.Clip(excerpt))
	}
	return answer, nil
}

func (t *Transport) exchange(req *http.Request) (status int, answer []byte, err error) {
	if address, err := netip.ParseAddr(req.URL.Hostname()); err == nil { // which a proxy would dial unseen
		if err := t.egress.Guard(address); err != nil {
			return 0, nil, err
		}
	}
	ctx, cancel := context.WithTimeout(req.Context(), alertTimeout)
	defer cancel()
	resp, err := t.HTTP.RoundTrip(req.WithContext(ctx))
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode >= 300 && resp.StatusCode <= 399 {
		return 0, nil, fmt.Errorf("the channel answered %d, and redirects are never followed; write the final address", resp.StatusCode)
	}
	if resp.StatusCode == http.StatusSwitchingProtocols {
		// The connection is handed over without its deadline: reading could hang for ever.
		return resp.StatusCode, nil, nil
	}
	answer, _ = io.ReadAll(io.LimitReader(resp.Body, maxAlertAnswer))
	return resp.StatusCode, answer, nil
}

// maxAlertTalk bounds what is read of a connection to a channel that speaks no HTTP, certificates
// included, in bytes.
const maxAlertTalk = 256 << 10

// DialContext connects to a channel that speaks no HTTP, such as a mail server: directly, as the
// proxy of Egress carries HTTP alone. The connection reads a bounded number of bytes, because
// net/smtp reads a line however long it is.
func (t *Transport) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := t.egress.Dialer(alertTimeout).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &boundedConn{Conn: conn, left: maxAlertTalk}, nil
}

// A boundedConn is a connection whose reads fail once left bytes were read. One goroutine reads at
// a time.
type boundedConn struct {
	net.Conn
	left int
}

// Read implements [io.Reader].
func (c *boundedConn) Read(p []byte) (n int, err error) {
	if c.left == 0 {
		return 0, fmt.Errorf("the channel answered more than %d KiB", maxAlertTalk>>10)
	}
	n, err = c.Conn.Read(p[:min(len(p), c.left)])
	c.left -= n
	return n, err
}
