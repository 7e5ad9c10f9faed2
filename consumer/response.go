package consumer

import (
	"fmt"
	"maps"
	"net/http"
	"strconv"

	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// answer is a complete response. None of it is sent before the transaction has ended.
type answer struct {
	status  int
	header  http.Header
	body    []byte
	ignored string // why the handler wants the event ignored; empty: it does not

	cause error // the handler's, for the report
	final bool  // neither sender nor worker tries again
}

func (a *answer) send(w http.ResponseWriter) {
	maps.Copy(w.Header(), a.header)
	if bodyAllowed(a.status) {
		// Whatever length the handler declared, this is the one that follows.
		w.Header().Set("Content-Length", strconv.Itoa(len(a.body)))
	}
	w.WriteHeader(a.status)
	if len(a.body) > 0 && bodyAllowed(a.status) {
		_, _ = w.Write(a.body) // the client has gone: its retry gets the stored status
	}
}

// success reports whether the handler asked for a commit.
func (a *answer) success() bool { return 200 <= a.status && a.status <= 299 }

func bodyAllowed(status int) bool {
	return status != http.StatusNoContent && status != http.StatusNotModified && status >= 200
}

// foundAnswer returns the answer for an event that is known or recorded: the status of the first
// answer, or the state of an inbox's event.
func foundAnswer(found memory.Found) *answer {
	a := &answer{status: found.Status, header: http.Header{}}
	if found.State != "" {
		a.header.Set("Content-Type", "application/json")
		a.body = []byte(`{"state":"` + found.State + `"}` + "\n")
	}
	return a
}

func (a *answer) replayed() *answer {
	a.header.Set(webhook.Replayed, "true")
	return a
}

// buffer is the handler's ResponseWriter. It deliberately lacks Flush, Hijack, ReadFrom and Unwrap,
// each of which would send a response before the commit that it announces.
type buffer struct {
	header http.Header
	answer answer
}

func newBuffer() *buffer { return &buffer{header: http.Header{}} }

func (b *buffer) Header() http.Header { return b.header }

func (b *buffer) WriteHeader(status int) {
	switch {
	case status < 100 || status > 999:
		panic(fmt.Sprintf("consumer: invalid WriteHeader code %d", status)) // as net/http does
	case status == http.StatusSwitchingProtocols:
		panic("consumer: a handler in a transaction cannot switch protocols")
	case status < 200:
		return // informational: not the response
	case b.answer.status != 0:
		return // the first one counts, as in net/http
	}
	b.answer.status = status
	b.answer.header = b.header.Clone() // later changes do not count either
}

func (b *buffer) Write(p []byte) (int, error) {
	if b.answer.status == 0 {
		b.WriteHeader(http.StatusOK)
	}
	if !bodyAllowed(b.answer.status) {
		return 0, http.ErrBodyNotAllowed
	}
	b.answer.body = append(b.answer.body, p...)
	return len(p), nil
}

// result returns the handler's answer. A handler that answered nothing gets no 200: its error may
// still be on the way to a framework.
func (b *buffer) result() *answer {
	if b.answer.status == 0 {
		refusal := noAnswer().answer()
		refusal.cause = errNoAnswer
		return refusal
	}
	return &b.answer
}
