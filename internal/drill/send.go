package drill

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/sleep"
)

// An answer is what came of one request.
type answer struct {
	status int
	header http.Header
	took   time.Duration
	err    error // there is no answer
}

// String says what the receiver did.
func (a answer) String() string {
	switch {
	case errors.Is(a.err, context.DeadlineExceeded):
		return fmt.Sprintf("did not answer within %s", a.took.Round(time.Millisecond))
	case a.err != nil:
		return fmt.Sprintf("gave no answer (%v)", a.err)
	}
	return fmt.Sprintf("answered %d %s", a.status, http.StatusText(a.status))
}

func (a answer) accepted() bool { return a.status >= 200 && a.status <= 299 }

// refused reports whether the answer says that the request is wrong.
func (a answer) refused() bool { return a.status >= 400 && a.status <= 499 }

// final reports whether a relay fails the event at once, instead of sending it again for hours.
func (a answer) final() bool {
	return slices.Contains([]int{400, 406, 411, 413, 414, 415, 422, 431, 501}, a.status)
}

// passing reports whether the answer means: not now, send it again.
func (a answer) passing() bool { return slices.Contains([]int{408, 409, 423, 425, 429, 503}, a.status) }

// maxAnswer bounds what is read of an answer, in bytes.
const maxAnswer = 1 << 20

// answerOf returns the answer that has arrived. What follows a 101 has neither an end nor a limit
// of time.
func answerOf(response *http.Response) answer {
	if response.StatusCode != http.StatusSwitchingProtocols {
		_, _ = io.Copy(io.Discard, io.LimitReader(response.Body, maxAnswer))
	}
	_ = response.Body.Close()
	return answer{status: response.StatusCode, header: response.Header}
}

// send sends an event once more.
func (t *trial) send(e event) answer { return t.sendWithin(e, t.Timeout) }

// accepts sends a valid event, again while the receiver is busy, and returns the status by which it
// was accepted.
func (t *trial) accepts(e event) int {
	a := t.send(e)
	if a.passing() {
		a = t.deliver(e.again())
	}
	if !a.accepted() {
		t.fault("it %s", a)
	}
	return a.status
}

func (t *trial) sendWithin(e event, timeout time.Duration) answer {
	header, body := t.request(e)
	return t.exchange(t.ctx, http.MethodPost, header, bytes.NewReader(body), timeout)
}

// exchange makes one request. A body that is no *bytes.Reader goes in chunks.
func (d *drill) exchange(ctx context.Context, method string, header http.Header, body io.Reader, timeout time.Duration) (a answer) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	began := time.Now()
	defer func() { a.took = time.Since(began) }()
	r, err := http.NewRequestWithContext(ctx, method, d.URL.String(), body)
	if err != nil {
		return answer{err: err}
	}
	r.Header, r.GetBody = header, nil // with GetBody net/http would send it twice, on its own
	d.requests.Add(1)
	response, err := d.http.RoundTrip(r)
	if err != nil {
		return answer{err: cmp.Or(ctx.Err(), err)}
	}
	return answerOf(response)
}

// Bounds of sending an event until it is accepted.
const (
	tries    = 10
	firstGap = 50 * time.Millisecond
	maxGap   = time.Second
)

// deliver sends an event as relays do, only sooner: until it is accepted, or refused for good. It
// returns the last answer.
func (t *trial) deliver(e event) (a answer) {
	gap := firstGap
	for range tries {
		if a = t.send(e); a.accepted() || a.final() || sleep.For(t.ctx, gap) != nil {
			break
		}
		e, gap = e.again(), min(2*gap, maxGap)
	}
	return a
}

// A wire is a connection on which requests can be sent in pieces. The end of the run closes it.
type wire struct {
	net.Conn
	reader *bufio.Reader
	ctx    context.Context //nolint:containedctx // that of the trial
}

// dial opens one. The caller closes it.
func (t *trial) dial() *wire {
	ctx, cancel := context.WithTimeout(t.ctx, t.Timeout)
	defer cancel()
	address := net.JoinHostPort(t.URL.Hostname(), cmp.Or(t.URL.Port(), map[string]string{"http": "80", "https": "443"}[t.URL.Scheme]))
	dial := t.Dialer.DialContext
	if t.URL.Scheme == "https" {
		dial = (&tls.Dialer{NetDialer: t.Dialer, Config: t.TLS}).DialContext
	}
	conn, err := dial(ctx, "tcp", address)
	if err != nil {
		t.fault("it cannot be reached: %v", err)
	}
	return &wire{conn, bufio.NewReader(conn), t.ctx}
}

// raw returns a request as it goes over a connection of HTTP/1.1: what comes before the body, and
// the body.
func (t *trial) raw(e event) (head, body []byte) {
	header, body := t.request(e)
	b := bytes.NewBufferString("POST " + t.URL.RequestURI() + " HTTP/1.1\r\nHost: " + t.URL.Host + "\r\n")
	_ = header.Write(b) // a buffer takes everything
	b.WriteString("Content-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n")
	t.requests.Add(1)
	return b.Bytes(), body
}

// write sends pieces, with a pause after each but the last.
func (w *wire) write(gap time.Duration, pieces ...[]byte) error {
	for i, piece := range pieces {
		if i > 0 {
			if err := sleep.For(w.ctx, gap); err != nil {
				return err
			}
		}
		if _, err := w.Write(piece); err != nil {
			return err
		}
	}
	return nil
}

// read returns the answer to what was sent.
func (w *wire) read(timeout time.Duration) answer {
	defer context.AfterFunc(w.ctx, func() { _ = w.Close() })()
	_ = w.SetReadDeadline(time.Now().Add(timeout))
	response, err := http.ReadResponse(w.reader, nil)
	switch {
	case isTimeout(err):
		return answer{err: context.DeadlineExceeded, took: timeout}
	case err != nil:
		return answer{err: err}
	}
	return answerOf(response)
}

func isTimeout(err error) bool {
	failure, ok := errors.AsType[net.Error](err)
	return ok && failure.Timeout()
}

// sendRaw sends pieces on their own connection and returns the answer.
func (t *trial) sendRaw(gap time.Duration, pieces ...[]byte) answer {
	w := t.dial()
	defer func() { _ = w.Close() }()
	if err := w.write(gap, pieces...); err != nil {
		return answer{err: err}
	}
	return w.read(t.Timeout)
}
