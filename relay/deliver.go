package relay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"code.dny.dev/ssrf"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Bounds of what a receiver can make the relay read, in bytes.
const (
	maxResponseHeader = 64 << 10
	maxDrain          = 64 << 10 // of a body, so that the connection can be used again
	maxExcerpt        = 1 << 10  // of a body, kept as evidence of a refusal
)

// crashLoop is after how many claims lost to a dead relay, with no settle between, a delivery is suspected of killing
// its relays.
const crashLoop = 20

// send empties a lane until there is nothing left for this sender.
func (r *Relay) send(l *lane) {
	for {
		d, ok := l.next()
		if !ok {
			return
		}
		started := time.Now()
		v := r.attempt(l, &d)
		r.settle(l, newSettlement(d, v, l.destination.Retry, started, time.Since(started), jitterFraction()))
	}
}

// giveBackUnsent empties the lanes' queues at a stop. The senders would do it too, but only when their POSTs have ended,
// and until then no other relay could take what waits behind them.
func (r *Relay) giveBackUnsent() {
	for _, l := range r.lanes {
		for _, d := range l.unsent() {
			v := verdict{outcome: Hold, reason: ReasonShutdown}
			r.settle(l, newSettlement(d, v, l.destination.Retry, time.Now(), 0, 0))
		}
	}
}

// attempt makes the one POST of a claim, unless something speaks against it.
func (r *Relay) attempt(l *lane, d *delivery) (v verdict) {
	// One delivery that trips a defect must not take the relay, and all others, with it.
	defer func() {
		if defect := recover(); defect != nil {
			v = verdict{outcome: Retry, reason: ReasonPanic, message: clip(fmt.Sprint("panic: ", defect)), posted: true}
		}
	}()
	if r.taking.Err() != nil {
		return verdict{outcome: Hold, reason: ReasonShutdown}
	}
	if l.paused() {
		return verdict{outcome: Hold, reason: ReasonPaused}
	}
	if time.Until(d.leaseEnds) < l.destination.Timeout+sendMargin {
		return verdict{outcome: Hold, reason: ReasonLease}
	}
	if d.rescues >= crashLoop {
		return verdict{outcome: Fail, reason: ReasonCrashLoop, message: fmt.Sprintf("%d relays died while holding this delivery", d.rescues)}
	}
	if d.event.key == nil {
		return verdict{outcome: Fail, reason: ReasonEventMissing, message: "the event is gone from outbox"}
	}
	if d.event.payload == nil {
		payload, err := r.store.payload(r.doing, d.eventID)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return verdict{outcome: Fail, reason: ReasonEventMissing, message: "the event is gone from outbox"}
		case err != nil:
			r.databaseError("load payload", err)
			return verdict{outcome: Hold, reason: ReasonDatabase}
		}
		d.event.payload = payload
	}
	req, err := newRequest(l, d, time.Now())
	if err != nil {
		return verdict{outcome: Fail, reason: ReasonInvalidEvent, message: clip(err.Error())}
	}
	ctx, cancel := context.WithTimeout(r.doing, l.destination.Timeout)
	defer cancel()
	v = post(l, req.WithContext(ctx))
	if v.outcome == Fail && v.reason == ReasonGone && !l.pause() {
		v.outcome = Retry // one has to tell; the others in flight wait with the rest until the destination is resumed
	}
	return v
}

// post makes exactly one request. It is a round trip of the transport, not a call of an http.Client, which would follow
// redirects: with a GET whose 200 looks like success, or with the body, key and signature to another host.
func post(l *lane, req *http.Request) verdict {
	resp, err := l.transport.RoundTrip(req)
	if err != nil {
		return judgeError(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode == http.StatusSwitchingProtocols {
		// The transport has handed the connection over, and with it the deadline: reading could hang for ever.
		return judgeResponse(resp.StatusCode, resp.Header, "", l.destination.Responses, time.Now())
	}
	var excerpt []byte
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		excerpt, _ = io.ReadAll(io.LimitReader(resp.Body, maxExcerpt))
	}
	// The status has decided; a body that breaks off changes nothing.
	_, _ = io.CopyN(io.Discard, resp.Body, maxDrain)
	return judgeResponse(resp.StatusCode, resp.Header, string(excerpt), l.destination.Responses, time.Now())
}

// newRequest expresses a delivery as the request of the wire contract. It fails for an event that no table constraint
// should have let in.
func newRequest(l *lane, d *delivery, now time.Time) (*http.Request, error) {
	e := &d.event
	header := make(http.Header, 20)
	if e.headers != nil {
		var own map[string]string
		if err := json.Unmarshal(e.headers, &own); err != nil {
			return nil, errors.New("the event's headers are not an object of strings")
		}
		for name, value := range own {
			canonical := http.CanonicalHeaderKey(name)
			if problem := headerProblem(name, value); problem != "" {
				return nil, fmt.Errorf("the event's header %q %s", name, problem)
			}
			header[canonical] = []string{value}
		}
	}
	for name, values := range l.header {
		header[name] = values
	}
	if e.eventType == nil || e.version == nil || !e.createdAt.Valid {
		return nil, errors.New("the event's type, version or created_at is missing")
	}
	if e.createdAt.InfinityModifier != pgtype.Finite {
		return nil, errors.New("the event's created_at is infinite")
	}
	id := strconv.FormatInt(d.eventID, 10)
	contract := [...]struct{ name, value string }{
		{webhook.IdempotencyKey, *e.key},
		{webhook.EventType, *e.eventType},
		{webhook.EventVersion, strconv.Itoa(*e.version)},
		{webhook.EventID, id},
		{webhook.CreatedAt, e.createdAt.Time.UTC().Format("2006-01-02T15:04:05.000000Z")},
		{webhook.Attempt, strconv.Itoa(d.attempts + 1)},
		{webhook.DeliveryID, id + "-" + d.destination + "-" + strconv.FormatInt(d.fence, 10)},
		{webhook.RelatedReference, valueOrEmpty(e.relatedReference)},
		{webhook.OrderingKey, valueOrEmpty(e.orderingKey)},
		{webhook.Sequence, ""},
	}
	if e.orderingKey != nil {
		// Ids grow in the order of inserts, and so does the order in which the deliveries of one key are sent.
		contract[len(contract)-1].value = id
	}
	values := make([]string, len(contract)) // one allocation for all
	for i, h := range contract {
		if !printableASCII(h.value) {
			return nil, fmt.Errorf("%s would hold characters beyond printable ASCII", h.name)
		}
		if h.value != "" {
			values[i] = h.value
			header[h.name] = values[i : i+1 : i+1]
		}
	}
	webhook.Sign(header, e.payload, now, l.destination.SigningSecrets...)

	// Made by hand and without GetBody: with it, and with an X-Idempotency-Key header, net/http would send a POST again
	// by itself when a reused connection breaks, and one attempt would be two requests.
	return &http.Request{
		Method:        http.MethodPost,
		URL:           l.url,
		Host:          l.url.Host,
		Header:        header,
		Body:          io.NopCloser(bytes.NewReader(e.payload)),
		ContentLength: int64(len(e.payload)),
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
	}, nil
}

func valueOrEmpty(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// printableASCII reports whether s can travel in a header and arrive unchanged.
func printableASCII(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}

// newLane prepares what all requests to a destination share.
func newLane(d Destination, version string) (*lane, error) {
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
	dialer := &net.Dialer{
		Timeout:        d.Timeout,
		KeepAlive:      15 * time.Second,
		ControlContext: guardDial,
	}
	return &lane{
		destination: d,
		url:         u,
		header:      header,
		limit:       d.MaxInFlight,
		transport: &http.Transport{
			DialContext:         dialer.DialContext,
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
		},
	}, nil
}

// Destinations are named in the configuration, so private networks and this host are theirs to use. Everything else
// that is not a public address is refused, above all the link-local ones under which clouds hand out credentials.
var guardian = ssrf.New(
	ssrf.WithAnyPort(),
	ssrf.WithAllowedV4Prefixes(prefixes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "127.0.0.0/8")...),
	ssrf.WithAllowedV6Prefixes(prefixes("fc00::/7", "::1/128")...),
)

// Metadata services inside the private ranges: AWS (IPv6), Alibaba Cloud.
var metadata = prefixes("fd00:ec2::/32", "100.100.100.200/32")

// guardDial decides on the address that a name has resolved to, immediately before the connection is made: a check of
// the URL's text would miss names that resolve to forbidden addresses, and other spellings of them.
func guardDial(_ context.Context, network, address string, conn syscall.RawConn) error {
	if addrPort, err := netip.ParseAddrPort(address); err == nil {
		if err := guardAddress(addrPort.Addr()); err != nil {
			return err
		}
	}
	return guardian.Safe(network, address, conn)
}

// guardAddress refuses the addresses that no destination may have.
func guardAddress(address netip.Addr) error {
	for _, prefix := range metadata {
		if prefix.Contains(address.Unmap()) {
			return fmt.Errorf("%w: %s is a cloud's metadata service", ssrf.ErrProhibitedIP, address)
		}
	}
	return guardian.SafeAddr(address.Unmap())
}

func prefixes(list ...string) []netip.Prefix {
	parsed := make([]netip.Prefix, len(list))
	for i, s := range list {
		parsed[i] = netip.MustParsePrefix(s)
	}
	return parsed
}
