package consumer_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
)

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

// errorsThatPanic are a handler's errors that cannot be asked what they mean.
func errorsThatPanic() map[string]error {
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

// An error that panics when it is looked at counts as a panic of the handler, and ends no process.
func TestInboxSurvivesErrorsThatPanic(t *testing.T) {
	t.Parallel()
	for name, bad := range errorsThatPanic() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newInbox(t, inbox.Config{
				Config:   consumer.Config{Breaker: breaker.MustNew(breaker.Config{})},
				Schedule: []time.Duration{time.Hour},
				Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
					_ = effectOf(ctx, event.Key)
					return bad
				},
			})
			p.run()
			p.record("k")
			if report := p.wantWorked("k", consumer.ResultFailed); report.Final {
				t.Errorf("reported %+v", report)
			}
			p.wantState("k", inbox.StatePending, 1)
			p.wantRows("k", 0, 1)
			p.wantLastError("k", "the handler panicked")
			if !strings.Contains(p.logged.String(), "stack=") {
				t.Errorf("logged %s", p.logged)
			}
			p.record("after") // the process works on
			p.wantWorked("after", consumer.ResultFailed)
		})
	}
}

// An Observe that panics changes no outcome, and ends no process.
func TestInboxSurvivesAnObserveThatPanics(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{Config: consumer.Config{Observe: func(_ context.Context, r consumer.Report) {
		if r.Inbox {
			panic("the observer of " + r.Event.Key + ", password=hunter2")
		}
	}}})
	p.run()
	for _, key := range []string{"1", "2"} {
		p.record(key)
		p.awaitState(key, inbox.StateSucceeded)
	}
	if err := p.stop(); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"1", "2"} {
		p.wantState(key, inbox.StateSucceeded, 1)
		p.wantRows(key, 1, 1)
	}
	logged := p.logged.String()
	for _, text := range []string{"level=ERROR", "Config.Observe panicked", "the observer of 1", "the observer of 2", "stack="} {
		if !strings.Contains(logged, text) {
			t.Errorf("%q is not in the log:\n%s", text, logged)
		}
	}
	if strings.Contains(logged, "hunter2") {
		t.Errorf("logged %s", logged)
	}
}
