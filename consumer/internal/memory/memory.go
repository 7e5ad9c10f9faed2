package memory

import (
	"context"
	"crypto/sha256"
	"net/http"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer/internal/headers"
)

// newReceiver is what package consumer provides.
var newReceiver func(config any, open func(Settings) (Memory, error)) (Receiver, error)

// Provide is called by package consumer when the program starts. This package cannot import it.
func Provide(f func(config any, open func(Settings) (Memory, error)) (Receiver, error)) struct{} {
	newReceiver = f
	return struct{}{}
}

// NewReceiver returns a receiver for config, a consumer.Config. open returns the memory for config
// with its defaults. NewReceiver fails when config cannot work or open fails.
func NewReceiver(config any, open func(Settings) (Memory, error)) (Receiver, error) {
	return newReceiver(config, open)
}

// A Receiver takes requests through their steps for the packages beside consumer.
type Receiver interface {
	// Handler returns the http.Handler that has work done for each event that is admitted, and
	// answers what its error asks for.
	Handler(work func(ctx context.Context) error) http.Handler

	// Middleware returns the http.Handler that lets next answer each event that is admitted.
	Middleware(next http.Handler) http.Handler
}

// A Memory distinguishes first requests from duplicates.
type Memory interface {
	// Admit finds out what to do with a request.
	Admit(ctx context.Context, rq *Request) (Found, error)
}

// Request is one that has proven itself.
type Request struct {
	Began  time.Time
	Event  headers.Event // without payload
	Header http.Header
	Body   []byte
	Hash   [sha256.Size]byte // of Body: distinguishes a duplicate from a reused key
}

// Admission is what a memory knows about an event when its request arrives.
type Admission int

// What may be known.
const (
	Admitted  Admission = iota // first time: the handler may run
	Recorded                   // first time: it is worked later
	Duplicate                  // known already
	Reused                     // known with another body
	Busy                       // another transaction is processing it
	Locked                     // another transaction holds it without its lock, or a lock that its row needs
	Forgotten                  // unknown, but so old that it may have been processed and forgotten
	Diverted                   // known from another destination of the sender
)

// Found is what becomes of a request.
type Found struct {
	Admission Admission
	Held      Held               // if it is admitted; for the caller to end
	Status    int                // of the first answer to a duplicate
	State     string             // of an inbox's event, which is answered
	Answered  func(flush func()) // is called after the answer, unless it is nil; flush sends that to the client
}

// Held is an admitted event. No other handler runs for it until it is remembered or rolled back.
type Held interface {
	// Lend returns the context of a handler for event, in which it finds what it works with.
	Lend(ctx context.Context, event headers.Event) (context.Context, context.CancelFunc)

	// Remember keeps the answer's status for duplicates, and why the event is ignored if that is
	// not empty. The event is no longer held afterwards in any case.
	Remember(ctx context.Context, status int, ignored string) error

	// Rollback gives the event up, so that the next request runs it. It reports false when the
	// handler has committed by itself what belongs to the event, so that no request may run it
	// again.
	Rollback() bool
}
