package consumer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

// freeBytes of every body do not count against the budget: most events are smaller, so a full budget does not delay them.
const freeBytes = 4 << 10

// readBody reads the body within Config.BodyTimeout, and returns how much of the budget for unverified bodies it has taken.
func (s *settings) readBody(w http.ResponseWriter, r *http.Request) (body []byte, held int64, refusal *problem) {
	deadline := time.Now().Add(s.BodyTimeout)
	// A ResponseWriter without read deadlines is that of a test, or it is hidden by what a middleware has put around it.
	bounded := http.NewResponseController(w).SetReadDeadline(deadline) == nil
	if !bounded && r.Context().Value(http.ServerContextKey) != nil {
		s.unverified.unbounded.Do(func() { s.warnUnbounded(w, r) })
	}
	if r.ContentLength > s.MaxBodyBytes {
		leaveUnread(w, r)
		return nil, 0, s.bodyTooLarge()
	}
	from := http.MaxBytesReader(w, r.Body, s.MaxBodyBytes)
	switch {
	case r.ContentLength < 0:
		body = make([]byte, 0, freeBytes)
	case r.ContentLength <= freeBytes:
		body = make([]byte, 0, r.ContentLength+1) // and room to find the end
	} // a larger one waits for the budget without a buffer
	for {
		if len(body) == cap(body) {
			more := max(cap(body), freeBytes)
			if !s.unverified.take(r.Context(), deadline, int64(more)) {
				return nil, held, receiverBusy()
			}
			held += int64(more)
			body = append(make([]byte, 0, cap(body)+more), body...) // no more than was taken, as slices.Grow might
		}
		n, err := from.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		switch _, large := errors.AsType[*http.MaxBytesError](err); {
		case err == nil:
		case large:
			return nil, held, s.bodyTooLarge()
		case err == io.EOF:
			if bounded { // or it would end the wait for the client to go. After an error it stays, lest the server waits for the rest
				_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
			}
			return body, held, nil
		default:
			// 408 and not 400, on which a relay gives the event up: the request broke on its way and may be whole next time.
			return nil, held, newProblem(http.StatusRequestTimeout, "body-unreadable", "The body did not arrive whole",
				fmt.Sprintf("The connection broke before the body's end, or that took longer than %v. Send the request again.", s.BodyTimeout))
		}
	}
}

// warnUnbounded says, once, that strangers can hold connections and memory for as long as they like.
func (s *settings) warnUnbounded(w http.ResponseWriter, r *http.Request) {
	s.shared.Logger().WarnContext(r.Context(), "consumer: BodyTimeout has no effect, because a middleware hides the connection's deadlines: give its ResponseWriter "+
		"a method Unwrap, or set http.Server.ReadTimeout", "receiver", s.Receiver, "source", s.Source, "writer", fmt.Sprintf("%T", w))
}

// unreadTimeout is for the rest of a body that is on its way while its request is refused.
const unreadTimeout = 500 * time.Millisecond

// leaveUnread prepares w for an answer to a request whose body is not wanted: the connection is closed after it. Otherwise
// net/http would read up to 256 KiB of the body first, and wait for them with all buffers of the connection.
func leaveUnread(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength == 0 {
		return // the connection can be used again
	}
	// To exceed a limit is the only way to have net/http close a connection that the client still writes to so that the
	// answer arrives: it waits half a second before it does, and gives its buffers back before that.
	_, _ = http.MaxBytesReader(w, io.NopCloser(strings.NewReader("x")), 0).Read(make([]byte, 1))
	deadline := time.Now()
	if w.Header().Get("Connection") != "close" { // w is not that of an HTTP/1 server
		deadline = deadline.Add(unreadTimeout)
	}
	_ = http.NewResponseController(w).SetReadDeadline(deadline)
}

func (s *settings) bodyTooLarge() *problem {
	return newProblem(http.StatusRequestEntityTooLarge, "body-too-large", "The body is too large",
		fmt.Sprintf("This receiver takes at most %d bytes (Config.MaxBodyBytes).", s.MaxBodyBytes))
}

func receiverBusy() *problem {
	return newProblem(http.StatusServiceUnavailable, "receiver-busy", "The receiver reads too many requests at once",
		"Nothing was tried and nothing was changed. Send the request again later.")
}

// A budget is what many requests may hold of memory together. It is safe for concurrent use.
type budget struct {
	unbounded sync.Once // said that BodyTimeout has no effect

	mu    sync.Mutex
	free  int64
	freed chan struct{} // closed when something is given back; nil while no request waits for that
}

func newBudget(bytes int64) *budget { return &budget{free: bytes} }

// take waits until n bytes are free. It reports false when ctx or the time ends first.
func (b *budget) take(ctx context.Context, until time.Time, n int64) bool {
	var timeout <-chan time.Time // without a timer until there is something to wait for
	for {
		b.mu.Lock()
		if b.free >= n {
			b.free -= n
			b.mu.Unlock()
			return true
		}
		if b.freed == nil {
			b.freed = make(chan struct{})
		}
		freed := b.freed
		b.mu.Unlock()
		if timeout == nil {
			timer := time.NewTimer(time.Until(until))
			defer timer.Stop()
			timeout = timer.C
		}
		select {
		case <-freed:
		case <-ctx.Done():
			return false
		case <-timeout:
			return false
		}
	}
}

func (b *budget) give(n int64) {
	if n == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.free += n
	if b.freed != nil {
		close(b.freed)
		b.freed = nil
	}
}
