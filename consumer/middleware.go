package consumer

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Middleware is [New] for handlers of net/http that write the answer themselves. They find their
// transaction by [Tx] and their event by [EventFrom]. A response with a status of 2xx commits, and
// is sent afterwards. Any other is sent after the rollback. Middleware fails when pool is nil or
// cfg cannot work.
//
// Only what the handler writes to its ResponseWriter before it returns counts. Without that the
// transaction is rolled back and the answer is 500 (no-answer). Two kinds of frameworks need care.
// Where handlers return errors, as in echo, the framework writes the answer to an error only after
// the middleware has returned. A gin.HandlerFunc writes past the ResponseWriter: the sender would
// get its 2xx although the transaction was rolled back, and the event would be lost. Put the whole
// gin.Engine behind Middleware, or a handler of net/http (gin.WrapH).
func Middleware(pool *pgxpool.Pool, cfg Config) (func(http.Handler) http.Handler, error) {
	receive, err := cfg.onPool("Middleware", pool)
	if err != nil {
		return nil, err
	}
	return receive.Middleware, nil
}

// Middleware returns a receiver that lets next answer.
func (rc receiver) Middleware(next http.Handler) http.Handler {
	rc.handle = func(ctx context.Context, r *http.Request, rq *request) *answer {
		response := newBuffer()
		next.ServeHTTP(response, rc.forHandler(r.WithContext(ctx), rq))
		return response.result()
	}
	return &rc
}

// forHandler returns r, which is a copy of the request, with an unread body. It removes the headers
// that a relay would have signed and a foreign sender has not, because a handler would trust them.
// Config.Verify.Custom may have proven all but those of a relay itself.
func (rc *receiver) forHandler(r *http.Request, rq *request) *http.Request {
	r.Body = io.NopCloser(bytes.NewReader(rq.Body))
	r.ContentLength = int64(len(rq.Body))
	r.TransferEncoding = nil
	if rq.Event.Foreign {
		r.Header = r.Header.Clone()
		maps.DeleteFunc(r.Header, func(name string, _ []string) bool {
			return name == webhook.IdempotencyKey || strings.HasPrefix(name, webhook.OutboxPrefix) ||
				rc.Verify.Custom == nil && webhook.Covered(name)
		})
	}
	return r
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
