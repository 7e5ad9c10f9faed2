package inbox_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/breaker"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
)

// An error that panics when it is looked at counts as a panic of the handler, and ends no process.
func TestInboxSurvivesErrorsThatPanic(t *testing.T) {
	t.Parallel()
	for name, bad := range receivertest.ErrorsThatPanic() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newInbox(t, inbox.Config{
				Config:   consumer.Config{Breaker: receivertest.Must(breaker.New(breaker.Config{}))},
				Schedule: []time.Duration{time.Hour},
				Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
					_ = receivertest.EffectOf(ctx, event.Key)
					return bad
				},
			})
			p.run()
			p.record("k")
			if report := p.wantWorked("k", consumer.ResultFailed); report.Final {
				t.Errorf("reported %+v", report)
			}
			p.wantState("k", inbox.StatePending, 1)
			p.WantRows("k", 0, 1)
			p.wantLastError("k", "the handler panicked")
			if !strings.Contains(p.Logged.String(), "stack=") {
				t.Errorf("logged %s", p.Logged)
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
	pgtest.Must(t, p.stop())
	for _, key := range []string{"1", "2"} {
		p.wantState(key, inbox.StateSucceeded, 1)
		p.WantRows(key, 1, 1)
	}
	logged := p.Logged.String()
	for _, text := range []string{"level=ERROR", "Config.Observe panicked", "the observer of 1", "the observer of 2", "stack="} {
		if !strings.Contains(logged, text) {
			t.Errorf("%q is not in the log:\n%s", text, logged)
		}
	}
	if strings.Contains(logged, "hunter2") {
		t.Errorf("logged %s", logged)
	}
}
