// Package message passes an event that a log carried to a receiver, which is a handler of HTTP
// requests: whatever carried the event, its signature, its place in processed_events, its handler
// and its report are the same.
package message

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A Message is an event as a log keeps it.
type Message struct {
	// Header holds the headers of the wire contract (docs/wire.md).
	Header http.Header
	Body   []byte
	// Stored is when the log took the message. Signatures are compared with it, because a message
	// may wait in a log for longer than any tolerance between two clocks.
	Stored time.Time
}

// An Outcome is what a receiver has made of a message.
type Outcome struct {
	Verdict Verdict
	// Wait is how long the receiver asks to wait before the message comes again. 0: it does not
	// say.
	Wait time.Duration
	// Status is what an HTTP client would have been answered; 0: nothing, since the handler ended
	// without an answer.
	Status int
	// Problem is the last part of the problem's type, such as "signature-invalid", and Detail its
	// text; empty where the receiver's handler answered in its own way.
	Problem, Detail string
}

// Delay returns how long to wait after the given failure of a message, 1 for the first one, where
// schedule holds the delays. That another process works the event is no failure: each further delay
// would be one more in which its partition waits for nothing.
func (o Outcome) Delay(failure int, schedule []time.Duration) time.Duration {
	if o.Problem == "in-flight" {
		failure = 1
	}
	return max(o.Wait, schedule[min(failure, len(schedule))-1])
}

// Verdict says what becomes of a message.
type Verdict int

// The verdicts.
const (
	Done    Verdict = iota // its effect is committed, or was before
	Again                  // nothing was changed; the same message may succeed later
	Refused                // nothing was changed, and no repetition will help
)

// Deliver has receiver process m, and returns when that is decided: after COMMIT or ROLLBACK. A
// receiver that panics or ends its goroutine counts as Again, and so does an end of ctx.
func Deliver(ctx context.Context, receiver http.Handler, m Message) Outcome {
	r, err := http.NewRequestWithContext(context.WithValue(ctx, storedKey{}, m.Stored), http.MethodPost, "/", bytes.NewReader(m.Body))
	if err != nil {
		panic(err) // method and URL are constants
	}
	r.Header = canonical(m.Header)
	out := Outcome{Verdict: Again}
	var handling sync.WaitGroup
	handling.Go(func() { // lest a handler that ends its goroutine ends the reader of the log
		defer func() { _ = recover() }() // http.ErrAbortHandler: the receiver has rolled back and reported; a server would close the connection
		w := &answer{header: http.Header{}}
		receiver.ServeHTTP(w, r)
		out = w.outcome()
	})
	handling.Wait()
	return out
}

type storedKey struct{}

// StoredAt returns when a log took the message of a request that came by [Deliver]; otherwise
// false.
func StoredAt(ctx context.Context) (at time.Time, ok bool) {
	at, ok = ctx.Value(storedKey{}).(time.Time)
	return at, ok
}

// canonical gives names the case that net/http would have given them. Two spellings of one name
// become a repeated header, which receivers refuse where it matters.
func canonical(h http.Header) http.Header {
	out := make(http.Header, len(h))
	for name, values := range h {
		name = http.CanonicalHeaderKey(name)
		out[name] = append(out[name], values...)
	}
	return out
}

// maxProblem bounds what is kept of a refusal's body, in bytes.
const maxProblem = 4 << 10

// answer is the ResponseWriter of a receiver.
type answer struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (a *answer) Header() http.Header { return a.header }

func (a *answer) WriteHeader(status int) {
	if a.status == 0 && status >= 200 {
		a.status = status
	}
}

func (a *answer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	a.body.Write(p[:min(len(p), maxProblem-a.body.Len())])
	return len(p), nil
}

// Flush lets an inbox continue once it has answered.
func (a *answer) Flush() {}

func (a *answer) outcome() Outcome {
	out := Outcome{Verdict: verdictOf(a.status), Status: a.status}
	if out.Verdict == Done {
		return out
	}
	if seconds, err := strconv.Atoi(a.header.Get("Retry-After")); err == nil && seconds > 0 {
		out.Wait = time.Duration(seconds) * time.Second
	}
	var problem struct {
		Type   string `json:"type"`
		Detail string `json:"detail"`
	}
	if json.Unmarshal(a.body.Bytes(), &problem) == nil {
		out.Problem = problem.Type[strings.LastIndexByte(problem.Type, ':')+1:]
		out.Detail = problem.Detail
	}
	return out
}

// Keep calls refused, which is to keep a message elsewhere, and reports whether the message may be
// given up. Errors and panics are logged, and so is an end of the goroutine: prefix names the
// reader, and again says what becomes of the message.
func Keep(ctx context.Context, log *slog.Logger, prefix, again string, refused func() error) (kept bool) {
	err := errors.New("it ended its goroutine")
	var panicked any
	var keeping sync.WaitGroup
	keeping.Go(func() { // lest one that ends its goroutine ends the reader of the log
		defer func() { panicked = recover() }()
		err = refused()
	})
	keeping.Wait()
	switch {
	case panicked != nil:
		log.ErrorContext(ctx, prefix+": Config.Refused panicked; "+again, "type", fmt.Sprintf("%T", panicked))
	case err != nil:
		log.ErrorContext(ctx, prefix+": Config.Refused failed; "+again, "error", err)
	}
	return err == nil
}

// Schedule returns the delays after the failures of a message: the given ones, or the default ones
// if there are none. It fails when one is not positive, since the message would come again at once.
// prefix names the reader in the error.
func Schedule(prefix string, given []time.Duration) ([]time.Duration, error) {
	for _, delay := range given {
		if delay <= 0 {
			return nil, fmt.Errorf("%s: Config.Schedule has a delay that is not positive (%v): the message would come again at once", prefix, delay)
		}
	}
	if len(given) == 0 {
		return []time.Duration{time.Second, 5 * time.Second, 30 * time.Second, time.Minute}, nil
	}
	return given, nil
}

// verdictOf reads a status as a relay does (docs/wire.md, "The answer").
func verdictOf(status int) Verdict {
	if webhook.Refuses(status) {
		return Refused
	}
	if 200 <= status && status <= 299 {
		return Done
	}
	return Again
}
