package consumer

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// freeBytes is the announced length up to which a body takes nothing from the budget. Most events
// are smaller, so a full budget does not delay them.
const freeBytes = 4 << 10

// readBody reads the body within Limits.BodyTimeout. It also returns the body's share of the budget
// for unverified bodies, which the caller gives back. The share is nil for a body of at most
// freeBytes.
func (s *settings) readBody(w http.ResponseWriter, r *http.Request) (body []byte, room *share, refusal *problem) {
	deadline := time.Now().Add(s.Limits.BodyTimeout)
	// A ResponseWriter has no read deadlines in a test, or when a middleware hides those of the
	// connection.
	connection := http.NewResponseController(w)
	bounded := connection.SetReadDeadline(deadline) == nil
	if !bounded && r.Context().Value(http.ServerContextKey) != nil {
		s.unverified.unbounded.Do(func() { s.warnUnbounded(w, r) })
	}
	length := r.ContentLength
	switch {
	case length > s.Limits.MaxBodyBytes:
		leaveUnread(w, r)
		return nil, nil, s.bodyTooLarge()
	case length < 0:
		length, body = s.Limits.MaxBodyBytes, make([]byte, 0, freeBytes)
	case length <= freeBytes:
		body = make([]byte, 0, length+1) // and room to find the end
	} // a larger one waits for its room without a buffer
	from := http.MaxBytesReader(w, r.Body, s.Limits.MaxBodyBytes)
	for {
		if len(body) == cap(body) {
			if room == nil {
				room = &share{bytes: length, rank: s.senders.rank(r.RemoteAddr)}
				if bounded {
					room.end = func() { _ = connection.SetReadDeadline(time.Unix(1, 0)) }
				}
				if !s.unverified.take(r.Context(), deadline, room) {
					leaveUnread(w, r)
					return nil, nil, receiverBusy()
				}
			}
			body = grow(body, length+1, r.ContentLength >= 0)
		}
		n, err := from.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		if room != nil {
			room.arrived.Add(int64(n))
		}
		switch _, large := errors.AsType[*http.MaxBytesError](err); {
		case err == nil:
		case large:
			return nil, room, s.bodyTooLarge()
		case !s.unverified.keep(room):
			leaveUnread(w, r)
			return nil, room, receiverBusy()
		case err == io.EOF:
			// The deadline would also end the wait for the client to go away. After an error it
			// stays, so that the server does not wait for the rest of the body.
			if bounded {
				_ = connection.SetReadDeadline(time.Time{})
			}
			return body, room, nil
		default:
			// On 400 a relay gives the event up, but this request may arrive whole next time.
			return nil, room, newProblem(http.StatusRequestTimeout, "body-unreadable", "The body did not arrive whole",
				fmt.Sprintf("The connection broke before the body's end, or that took longer than %v. Send the request again.", s.Limits.BodyTimeout))
		}
	}
}

// grow returns the body in a larger buffer: one of its whole length if the client declared that,
// else one of twice the size, at most length.
func grow(body []byte, length int64, declared bool) []byte {
	if !declared {
		length = min(length, 2*int64(cap(body)))
	}
	return append(make([]byte, 0, length), body...)
}

// warnUnbounded logs, once, that a client can hold a connection and memory for any time.
func (s *settings) warnUnbounded(w http.ResponseWriter, r *http.Request) {
	s.shared.Logger().WarnContext(r.Context(), "consumer: BodyTimeout has no effect, because a middleware hides the connection's deadlines: give its ResponseWriter "+
		"a method Unwrap, or set http.Server.ReadTimeout", "receiver", s.Receiver, "source", s.Source, "writer", fmt.Sprintf("%T", w))
}

// unreadTimeout bounds reading the rest of a body whose request is refused.
const unreadTimeout = 500 * time.Millisecond

// leaveUnread makes net/http close the connection after the answer instead of reading the body.
// net/http would otherwise read up to 256 KiB of it first, and keep the connection's buffers while
// it waits for them.
func leaveUnread(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength == 0 {
		return // the connection can be used again
	}
	// Exceeding a limit is the only way to make net/http close a connection that the client still
	// writes to and still deliver the answer. net/http releases its buffers at once and closes half
	// a second later.
	_, _ = http.MaxBytesReader(w, io.NopCloser(strings.NewReader("x")), 0).Read(make([]byte, 1))
	deadline := time.Now()
	if w.Header().Get("Connection") != "close" { // w is not that of an HTTP/1 server
		deadline = deadline.Add(unreadTimeout)
	}
	_ = http.NewResponseController(w).SetReadDeadline(deadline)
}

func (s *settings) bodyTooLarge() *problem {
	return newProblem(http.StatusRequestEntityTooLarge, "body-too-large", "The body is too large",
		fmt.Sprintf("This receiver takes at most %d bytes (Config.Limits.MaxBodyBytes).", s.Limits.MaxBodyBytes))
}

func receiverBusy() *problem {
	return newProblem(http.StatusServiceUnavailable, "receiver-busy", "The receiver reads too many requests at once",
		"Nothing was tried and nothing was changed. Send the request again later.")
}
