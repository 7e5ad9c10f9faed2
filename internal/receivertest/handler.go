package receivertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/consumer"
)

// DiscardWriter takes the answer of a handler that is called for its effect.
type DiscardWriter struct{}

// Header returns a header that is not sent.
func (DiscardWriter) Header() http.Header { return http.Header{} }

// WriteHeader does nothing.
func (DiscardWriter) WriteHeader(int) {}

func (DiscardWriter) Write(p []byte) (int, error) { return len(p), nil }

// HandlerFunc is a consumer.Handler of either flavour, which writes by Flavour.Exec.
type HandlerFunc func(ctx context.Context, event consumer.Event) error

// requestKey is that of the request in the context of a handler of NewHandlerEnv: tests direct
// their handlers by headers.
type requestKey struct{}

// Ignoring has the event ignored after what a plain handler does; the answer of that is dropped.
func Ignoring(handler func(e *Env) http.HandlerFunc) func(e *Env) HandlerFunc {
	return func(e *Env) HandlerFunc {
		plain := handler(e)
		return func(ctx context.Context, _ consumer.Event) error {
			plain(DiscardWriter{}, ctx.Value(requestKey{}).(*http.Request).WithContext(ctx))
			return consumer.Ignore("no concern")
		}
	}
}

// Effect is the ordinary handler: one row, and a response that distinguishes runs from replays.
func Effect(e *Env) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		key := consumer.EventFrom(r.Context()).IdempotencyKey
		if err := e.Exec(r.Context(), "INSERT INTO effect VALUES ($1)", key); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Handler", "ran")
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, `{"done":"`+key+`"}`)
	}
}

// EffectOf is the ordinary handler's work.
func EffectOf(ctx context.Context, key string) error {
	_, err := consumer.Tx(ctx).Exec(ctx, "INSERT INTO effect (key) VALUES ($1)", key)
	return err
}

// ErrHandler is the error of a handler that fails.
var ErrHandler = errors.New("the handler is not pleased")

// troubled is an error one of whose methods panics.
type troubled struct{ method string }

func (e *troubled) Error() string { return "in trouble" }
func (e *troubled) Unwrap() error { e.panics("Unwrap"); return nil }
func (e *troubled) Is(error) bool { e.panics("Is"); return false }
func (e *troubled) As(any) bool   { e.panics("As"); return false }

func (e *troubled) panics(method string) {
	if e.method == method {
		panic(method + " panicked")
	}
}

// ErrorsThatPanic are a handler's errors that cannot be asked what they mean.
func ErrorsThatPanic() map[string]error {
	var none *pgconn.PgError
	return map[string]error{
		"a nil pointer":            none,
		"a nil pointer, wrapped":   fmt.Errorf("insert: %w", none),
		"a nil pointer, permanent": consumer.Permanent(none),
		"Unwrap":                   &troubled{"Unwrap"},
		"Is":                       &troubled{"Is"},
		"As":                       &troubled{"As"},
	}
}

// LargeObjects is what a handler has left behind.
type LargeObjects struct {
	all pgx.LargeObjects
	one *pgx.LargeObject
}

// WriteLargeObject leaves a large object behind.
func WriteLargeObject(ctx context.Context, tx pgx.Tx) (LargeObjects, error) {
	kept := LargeObjects{all: tx.LargeObjects()}
	oid, err := kept.all.Create(ctx, 0)
	if err == nil {
		kept.one, err = kept.all.Open(context.WithoutCancel(ctx), oid, pgx.LargeObjectModeWrite)
	}
	if err == nil {
		_, err = io.WriteString(kept.one, "kept")
	}
	return kept, err
}

// Use tries to write into whatever transaction it reaches, and must reach none.
func (l LargeObjects) Use(ctx context.Context, t *testing.T) {
	if oid, err := l.all.Create(ctx, 0); err == nil {
		t.Errorf("large object %d is created in the transaction of another event", oid)
	}
	if _, err := l.one.Write([]byte("late")); err == nil {
		t.Error("a large object is written in the transaction of another event")
	}
}

// OnceThenEffect asks for the event that it works.
func OnceThenEffect(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
	first, err := consumer.Once(ctx, tx, event)
	if err != nil || !first {
		return err
	}
	return EffectOf(ctx, event.IdempotencyKey)
}
