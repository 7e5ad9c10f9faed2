package inbox_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// In an inbox, an event that is newer than the receiver waits for the deploy, and holds up no other.
func TestRouterInAnInbox(t *testing.T) {
	t.Parallel()
	effects := func(ctx context.Context, _ pgx.Tx, event consumer.Event, _ struct{ Key string }) error {
		return receivertest.EffectOf(ctx, event.Key)
	}
	before := consumer.NewRouter()
	consumer.HandleJSON(before, "invoice.created", 1, effects)
	old := newInbox(t, inbox.Config{Handle: before.Dispatch, PollInterval: never})
	old.run()

	old.record("known")
	old.wantWorked("known", consumer.ResultProcessed)
	old.record("newer", receivertest.With(webhook.EventVersion, "2"), ordered("a", 1))
	if report := old.wantWorked("newer", consumer.ResultIgnored); !errors.Is(report.Err, consumer.ErrUnknownEvent) {
		t.Errorf("report %+v", report)
	}
	old.record("other", receivertest.With(webhook.EventType, "invoice.deleted"))
	old.wantWorked("other", consumer.ResultIgnored)
	old.record("next", ordered("a", 2))
	old.wantWorked("next", consumer.ResultProcessed)
	old.wantState("newer", inbox.StateIgnored, 1)
	if n := old.Count("SELECT count(*) FROM inbox_events WHERE last_error = 'no handler for invoice.created version 2'"); n != 1 {
		t.Error("the reason is not there")
	}
	got := old.Do(old.NewRequest("malformed", `{"key":4711}`))
	if got.Status != http.StatusAccepted {
		t.Fatalf("status %d", got.Status)
	}
	if report := old.wantWorked("malformed", consumer.ResultFailed); !report.Final || strings.Contains(report.Err.Error(), "4711") {
		t.Errorf("report %+v", report)
	}
	old.wantState("malformed", inbox.StateFailed, 1)
	pgtest.Must(t, old.stop())

	after := consumer.NewRouter()
	consumer.HandleJSON(after, "invoice.*", 0, effects)
	deployed := old.again(inbox.Config{Handle: after.Dispatch, PollInterval: never})
	deployed.run()
	if n, err := deployed.replay(inboxops.Selection{Type: "invoice.*", States: []string{inboxops.Ignored}}); n != 2 || err != nil {
		t.Errorf("replayed %d, %v", n, err)
	}
	for range 2 {
		if report := deployed.worked(); report.Result != consumer.ResultProcessed {
			t.Errorf("report %+v", report)
		}
	}
	for _, key := range []string{"known", "newer", "other", "next"} {
		deployed.WantRows(key, 1, 1)
	}
}
