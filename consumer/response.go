package consumer

import (
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Headers that mark a duplicate's answer.
const (
	// HeaderReplayed is "true" on a response that was stored when the event was processed.
	HeaderReplayed = "Idempotency-Replayed"
	// HeaderBodyOmitted is "true" beside it when the stored response has no body because it exceeded
	// [Config].MaxResponseBytes.
	HeaderBodyOmitted = "Idempotency-Body-Omitted"
)

// answer is a whole response. Nothing of it is on the wire before the transaction has ended.
type answer struct {
	status  int
	header  http.Header
	body    []byte
	omitted bool   // the body was too long to be stored
	ignored string // why the handler wants the event ignored; empty: it does not
}

func (a *answer) send(w http.ResponseWriter) {
	maps.Copy(w.Header(), a.header)
	if bodyAllowed(a.status) {
		// Whatever length the handler declared, this is the one that follows.
		w.Header().Set("Content-Length", strconv.Itoa(len(a.body)))
	}
	w.WriteHeader(a.status)
	if len(a.body) > 0 && bodyAllowed(a.status) {
		_, _ = w.Write(a.body) // the client has gone: its retry gets the stored response
	}
}

// success reports whether the handler asked for a commit.
func (a *answer) success() bool { return 200 <= a.status && a.status <= 299 }

func bodyAllowed(status int) bool {
	return status != http.StatusNoContent && status != http.StatusNotModified && status >= 200
}

// stored returns what is kept for duplicates: at most limit bytes of body, and the headers that would be as true for a
// later answer as for this one.
func (a *answer) stored(limit int64) *answer {
	kept := &answer{status: a.status, header: http.Header{}, body: a.body}
	if int64(len(a.body)) > limit {
		kept.body, kept.omitted = nil, true
	}
	for name, values := range a.header {
		if storable(name, values) && !(kept.omitted && strings.HasPrefix(name, "Content-")) {
			kept.header[name] = values
		}
	}
	return kept
}

// anticipated reports whether an answer to be stored is the one that admitSQL has stored already.
func (a *answer) anticipated() bool {
	return a.status == http.StatusNoContent && len(a.header) == 0 && len(a.body) == 0 && !a.omitted
}

// storable refuses headers that belong to one exchange or one connection. A cookie is also a credential, which has no
// place in a table.
func storable(name string, values []string) bool {
	switch http.CanonicalHeaderKey(name) {
	case "Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
		"Content-Length", "Date", "Set-Cookie", HeaderReplayed, HeaderBodyOmitted:
		return false
	}
	for _, value := range values {
		// jsonb cannot hold these, and one odd header must not fail the commit.
		if !utf8.ValidString(value) || strings.Contains(value, "\x00") {
			return false
		}
	}
	return !strings.HasPrefix(name, http.TrailerPrefix) && utf8.ValidString(name) && !strings.Contains(name, "\x00")
}

// replayed is the answer to a duplicate.
func (a *answer) replayed() *answer {
	a.header.Set(HeaderReplayed, "true")
	if a.omitted {
		a.header.Set(HeaderBodyOmitted, "true")
	}
	return a
}

// buffer is the ResponseWriter of the handler. It has no Flush, Hijack, ReadFrom or Unwrap on purpose: each of them
// would let a response out before the commit that it announces.
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

// result ends the handler's part: a handler that wrote nothing answered 200.
func (b *buffer) result() *answer {
	if b.answer.status == 0 {
		b.WriteHeader(http.StatusOK)
	}
	return &b.answer
}
