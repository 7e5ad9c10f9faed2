package post

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/batchpost"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// An Endpoint is where and how a lane's messages go: what all attempts at a destination share. What
// they use of it never changes once made, so that senders need no lock while another one takes its
// place; a certificate or credential that changes does so behind it.
type Endpoint struct {
	carrier
	Destination Destination
	URL         *url.URL
	// Dial opens connections, as the destination's [Egress] allows. A test may replace it before
	// the first request.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Log receives what happens to connections between attempts. It is set before the first one.
	// The zero value discards.
	Log zerolog.Logger
	// What never changes of a message: the destination's own headers, and its secrets.
	header []field
	signer *webhook.Signer
	texts  buffers // of what is signed

	// Of HTTP alone.
	Transport     *http.Transport
	direct        *direct   // nil: every request goes by Transport
	requests      sync.Pool // of *Request
	requestLine   []byte    // with the host
	authorization func() string
	offer         *batchpost.Offer // of batches; nil: none are sent

	mu       sync.Mutex
	inFlight int  // attempts on their way, and calls of Reach
	retired  bool // another one took its place: its connections are closed when nothing is in flight
}

// buffers hold texts while they are made. They are safe for concurrent use.
type buffers struct{ pool sync.Pool }

func (b *buffers) get() *[]byte {
	if text, ok := b.pool.Get().(*[]byte); ok {
		return text
	}
	return new([]byte)
}

// begin counts an attempt that is about to be made, or a call of Reach.
func (e *Endpoint) begin() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.inFlight++
}

// end stops counting an attempt that was answered, or given up, or a call of Reach.
func (e *Endpoint) end() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.inFlight--
	e.closeUnused()
}

// Retire closes the kept connections once nothing needs them.
func (e *Endpoint) Retire() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.retired = true
	e.closeUnused()
}

// closeUnused waits until nothing is in flight, because net/http counts a connection as idle a
// moment before it hands over the answer that came on it. Closed in that moment, the answer is
// lost, and what the receiver did is done again.
func (e *Endpoint) closeUnused() {
	if e.retired && e.inFlight == 0 {
		e.CloseIdleConnections()
	}
}

// NewEndpoint prepares the attempts at a destination. It connects to nothing.
func NewEndpoint(d Destination, version string) (*Endpoint, error) {
	u, err := ParseURL(d.URL)
	if err != nil {
		return nil, fmt.Errorf("parse url of %s: %w", d.Name, err)
	}
	e := &Endpoint{
		Destination: d, URL: u, signer: webhook.NewSigner(d.SigningSecrets...), Dial: d.Wire.egress.Dialer(d.Timeout).DialContext,
	}
	if e.carrier, err = newCarrier(e, strings.TrimSuffix("outbox-relay/"+version, "/")); err != nil {
		return nil, fmt.Errorf("%s: %w", d.Name, err)
	}
	return e, nil
}

// dial opens a connection. If there is no descriptor left for it, dial closes direct connections of
// this endpoint that are idle. A request that cannot be sent directly would wait until they
// end.
func (e *Endpoint) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := e.Dial(ctx, network, address)
	if e.direct != nil && lacksDescriptor(err) {
		e.direct.closeIdle()
		conn, err = e.Dial(ctx, network, address)
	}
	return conn, err
}

// lacksDescriptor reports whether a dial has failed for want of a descriptor. A lookup keeps only
// the text of that.
func lacksDescriptor(err error) bool {
	return err != nil && (strings.Contains(err.Error(), syscall.EMFILE.Error()) || strings.Contains(err.Error(), syscall.ENFILE.Error()))
}

// setHeader makes the headers that all messages share: agent, unless that is empty, and the
// destination's own. It reports whether none of these needs what net/http does to some.
func (e *Endpoint) setHeader(agent string) (plainHeaders bool) {
	header := http.Header{"Content-Type": {"application/json"}}
	if agent != "" {
		header.Set("User-Agent", agent)
	}
	for name, value := range e.Destination.Headers {
		header.Set(webhook.SentName(name), value)
	}
	plainHeaders = true
	for _, name := range slices.Sorted(maps.Keys(header)) {
		e.header = append(e.header, field{name, header.Get(name)})
		plainHeaders = plainHeaders && headerName.MatchString(name) && (name == "Content-Type" || !webhook.Reserved(name))
	}
	return plainHeaders
}

// newHTTP prepares the requests of an endpoint. agent says who sends them.
func newHTTP(e *Endpoint, agent string) (carrier, error) {
	d, u := e.Destination, e.URL
	proxy, err := d.Wire.proxy()
	if err != nil {
		return nil, err
	}
	plainHeaders := e.setHeader(agent)
	e.authorization = d.Wire.Authorization
	e.requestLine = requestLine(u)
	// http.Transport spells other names of hosts in ASCII.
	if canSeeClosed && u.Scheme == "http" && proxy == nil && e.requestLine != nil && plainHeaders && plain.IsASCII(u.Hostname()) {
		e.direct = &direct{dial: e.dial, address: net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "80")), most: 2 * d.MaxInFlight}
	}
	e.Transport = &http.Transport{
		DialContext:            countWrites(e.dial),
		Proxy:                  proxy,
		OnProxyConnectResponse: ProxyRefusal,
		ForceAttemptHTTP2:      true,
		TLSClientConfig:        d.Wire.TLS.config(u.Hostname()),
		TLSHandshakeTimeout:    d.Timeout,
		// All connections are kept. The default of two would dial for nearly every POST; as many as
		// there are POSTs in flight would close those that were dialled for a request which another
		// connection became free for meanwhile.
		MaxIdleConns:           2 * d.MaxInFlight,
		MaxIdleConnsPerHost:    2 * d.MaxInFlight,
		IdleConnTimeout:        90 * time.Second,
		MaxResponseHeaderBytes: maxResponseHeader,
		// A few kilobytes of gzip can hold gigabytes.
		DisableCompression: true,
	}
	if d.Batch.Max > 1 {
		return newBatches(e), nil
	}
	return overHTTP{e}, nil
}

// requestLine returns how net/http begins a request to a URL, up to the end of the host's line;
// nil: it refuses to.
func requestLine(u *url.URL) []byte {
	var written bytes.Buffer
	req := http.Request{Method: http.MethodPost, URL: u, Host: u.Host, Header: http.Header{"User-Agent": {""}}}
	if err := req.Write(&written); err != nil {
		return nil
	}
	line, _, _ := bytes.Cut(written.Bytes(), []byte("Content-Length: 0\r\n"))
	return line
}

// ProxyRefusal makes a proxy's refusal an error that says whose it is, and that no connection came
// about.
func ProxyRefusal(_ context.Context, _ *url.URL, _ *http.Request, answer *http.Response) error {
	if answer.StatusCode == http.StatusOK {
		return nil
	}
	return &net.OpError{Op: "dial", Net: "tcp", Err: fmt.Errorf("the proxy answered %s", answer.Status)}
}

// errNothingSent is the error of a request that met nothing but kept connections that were closed
// already, of which no receiver can know.
var errNothingSent = errors.New("the receiver closed its kept connections before anything was sent")

// maxStale is on how many kept connections in a row a request may find out that they were closed.
const maxStale = 3

// roundTrip sends a request, once, and reports whether it had a connection to send it over.
// Receivers close idle connections at any time, also when a request is about to be written. While
// it is certain that not one byte of it was, it is sent over another connection; net/http itself
// would do so, and in other cases too, if the request had a GetBody. An answer of 101 has no body:
// the transport has handed the connection over, and with it the deadline, so reading could hang for
// ever.
func (e *Endpoint) roundTrip(ctx context.Context, req *http.Request, payload []byte) (resp *http.Response, connected bool, err error) {
	for range maxStale {
		sent := &sending{}
		resp, err = e.Transport.RoundTrip(req.WithContext(sent.watch(ctx)))
		connected, nothing := sent.state()
		if err == nil && resp.StatusCode == http.StatusSwitchingProtocols {
			_ = resp.Body.Close()
			resp.Body = http.NoBody
		}
		if err == nil || !nothing {
			return resp, connected, err
		}
		req.Body = newBody(payload)
	}
	return nil, false, errNothingSent
}

// newBody returns a request's body, from its beginning. It is one of the few that net/http knows to
// be at hand: before any other, our own type for instance, it flushes the header, and each
// request is two writes and two packets.
func newBody(payload []byte) io.ReadCloser { return io.NopCloser(bytes.NewReader(payload)) }

// A sending watches one request on its way, to tell whether any of it can have left this host.
type sending struct {
	mu     sync.Mutex
	begun  bool         // there was a connection, secured and ready
	conn   *countedConn // of HTTP/1.1, where one request has a connection for itself; nil: another, or none
	before int64        // bytes written to it by others
	reused bool
}

// watch returns the context of the request to watch.
func (s *sending) watch(ctx context.Context) context.Context {
	trace := &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) {
		conn := info.Conn
		multiplexed := false
		if secure, ok := conn.(*tls.Conn); ok {
			multiplexed = secure.ConnectionState().NegotiatedProtocol == "h2"
			conn = secure.NetConn()
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.begun, s.conn, s.reused = true, nil, info.Reused
		if counted, ok := conn.(*countedConn); ok && !multiplexed {
			s.conn, s.before = counted, counted.written.Load()
		}
	}}
	return httptrace.WithClientTrace(ctx, trace)
}

// state reports whether there was a connection, dialled, secured and ready for the request, and
// whether it was a kept one that took not a byte of it. On a new connection that says something
// about the receiver, and is an attempt. It may be asked once RoundTrip has returned, which over
// HTTP/1.1 happens after the last write.
func (s *sending) state() (connected, nothing bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.begun, s.reused && s.conn != nil && s.conn.written.Load() == s.before
}

// A countedConn knows how many bytes it has been given to send, whether or not they arrived.
type countedConn struct {
	net.Conn
	written atomic.Int64
}

func (c *countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.written.Add(int64(n))
	return n, err
}

// countWrites wraps what a dialer returns.
func countWrites(dial func(context.Context, string, string) (net.Conn, error)) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &countedConn{Conn: conn}, nil
	}
}

// explain adds to an error what its reader can do about it.
func explain(err error) error {
	var (
		authority x509.UnknownAuthorityError
		name      x509.HostnameError
		record    tls.RecordHeaderError
	)
	var hint string
	switch {
	case errors.As(err, &authority):
		hint = "set tls.ca_file to the authority's certificate"
	case errors.As(err, &name):
		hint = "if the url is right, set tls.server_name to a name of the certificate"
	case errors.As(err, &record) && string(record.RecordHeader[:]) == "HTTP/":
		hint = "that port speaks HTTP without TLS; write http:// or the port of its TLS"
	case strings.Contains(err.Error(), "tls: certificate required"): // an alert, whose type is not exported
		hint = "it asks for a client certificate: set tls.cert_file and tls.key_file"
	case strings.Contains(err.Error(), "REFUSED_STREAM"):
		return errors.New("http2: the receiver refused the stream (set max_in_flight to no more than the streams it allows)")
	case strings.Contains(err.Error(), "cannot rewind body"): // of a request that met a connection with all streams in use
		return errors.New("http2: the receiver's connection took no further stream (set max_in_flight to no more than the streams it allows)")
	case strings.Contains(err.Error(), "GOAWAY"):
		return errors.New("http2: the receiver closed its connection")
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), strings.Contains(err.Error(), "server closed idle connection"):
		return plainError{io.EOF, "the receiver closed the connection without an answer"}
	default:
		return err
	}
	return fmt.Errorf("%w (%s)", err, hint)
}

// A plainError says in plain words what an error of a library means, and is classified as that
// error.
type plainError struct {
	error
	text string
}

func (e plainError) Error() string { return e.text }
func (e plainError) Unwrap() error { return e.error }
