package consumer

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// A body that announces no more than freeBytes needs no room of the budget: most events are smaller, so a full budget does not delay
// them.
const freeBytes = 4 << 10

// readBody reads the body within Config.Limits.BodyTimeout. It returns the body's room in the budget for unverified bodies, nil for
// a small body, for the caller to give back.
func (s *settings) readBody(w http.ResponseWriter, r *http.Request) (body []byte, room *share, refusal *problem) {
	deadline := time.Now().Add(s.Limits.BodyTimeout)
	// A ResponseWriter without read deadlines is that of a test, or it is hidden by what a middleware has put around it.
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
				room = &share{bytes: length}
				if bounded {
					room.end = func() { _ = connection.SetReadDeadline(time.Unix(1, 0)) }
				}
				if !s.unverified.take(r.Context(), deadline, room) {
					leaveUnread(w, r)
					return nil, nil, receiverBusy()
				}
			}
			grown := length + 1
			if r.ContentLength < 0 {
				grown = min(grown, 2*int64(cap(body)))
			}
			body = append(make([]byte, 0, grown), body...)
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
			if bounded { // or it would end the wait for the client to go. After an error it stays, lest the server waits for the rest
				_ = connection.SetReadDeadline(time.Time{})
			}
			return body, room, nil
		default:
			// 408 and not 400, on which a relay gives the event up: the request broke on its way and may be whole next time.
			return nil, room, newProblem(http.StatusRequestTimeout, "body-unreadable", "The body did not arrive whole",
				fmt.Sprintf("The connection broke before the body's end, or that took longer than %v. Send the request again.", s.Limits.BodyTimeout))
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
		fmt.Sprintf("This receiver takes at most %d bytes (Config.Limits.MaxBodyBytes).", s.Limits.MaxBodyBytes))
}

func receiverBusy() *problem {
	return newProblem(http.StatusServiceUnavailable, "receiver-busy", "The receiver reads too many requests at once",
		"Nothing was tried and nothing was changed. Send the request again later.")
}
