package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"net/http"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A handler may read and change the row of its own event, such as to remove what is personal in it.
func TestInboxHandlersMayChangeTheirOwnRow(t *testing.T) {
	t.Parallel()
	for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run(level.String(), func(t *testing.T) {
			t.Parallel()
			p := newInbox(t, inbox.Config{Config: consumer.Config{Isolation: level}, Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
				var state string
				read := consumer.Tx(ctx).QueryRow(ctx, "SELECT processing_state FROM inbox_events WHERE idempotency_key = $1", event.Key).Scan(&state)
				_, err := consumer.Tx(ctx).Exec(ctx, "UPDATE inbox_events SET payload = NULL WHERE related_reference = $1", event.RelatedReference)
				return errors.Join(receivertest.EffectOf(ctx, event.Key), read, err)
			}})
			p.run()
			personal := receivertest.With(webhook.RelatedReference, "customer 42")
			p.record("1", ordered("o", 1), personal)
			p.wantWorked("1", consumer.ResultProcessed)
			p.record("2", ordered("o", 2), personal)
			p.wantWorked("2", consumer.ResultProcessed)
			for _, key := range []string{"1", "2"} {
				p.wantState(key, inbox.StateSucceeded, 1)
				p.WantRows(key, 1, 1)
			}
			if n := p.Count("SELECT count(*) FROM inbox_events WHERE payload IS NULL"); n != 2 {
				t.Errorf("%d payloads are removed, want 2", n)
			}
		})
	}
}

// What has no payload any more is not worked: neither by a replay, nor when it is made pending by hand.
func TestInboxDoesNotWorkRemovedPayloads(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	for _, key := range []string{"1", "2", "3", "4"} {
		p.record(key)
	}
	for _, state := range []inbox.State{inbox.StateFailed, inbox.StateSucceeded} {
		p.MustExec("UPDATE inbox_events SET processing_state = $1, next_attempt_at = NULL, payload = CASE idempotency_key WHEN '3' THEN payload END", string(state))
		for _, test := range []struct {
			filter inboxops.Selection
			want   int64
		}{
			{inboxops.Selection{Key: "1"}, 0},
			{inboxops.Selection{Type: "*", Limit: 1}, 1}, // the third: removed ones do not count
			{inboxops.Selection{FromID: 1}, 0},
		} {
			test.filter.States = []string{string(state)}
			if n, err := p.replay(test.filter); n != test.want || err != nil {
				t.Errorf("replayed %d, %v of %+v, want %d", n, err, test.filter, test.want)
			}
		}
		p.wantState("3", inbox.StatePending, 0)
	}
	if n, err := p.ignore(inboxops.Selection{Key: "3"}); n != 1 || err != nil {
		t.Errorf("ignored %d, %v", n, err)
	}
	p.MustExec("UPDATE inbox_events SET processing_state = 'failed'")
	if n, err := p.ignore(inboxops.Selection{Type: "*"}); n != 4 || err != nil {
		t.Errorf("ignored %d, %v, want those without a payload, too", n, err)
	}

	p.MustExec("UPDATE inbox_events SET processing_state = 'pending', next_attempt_at = now() WHERE idempotency_key = '1'")
	p.run()
	if report := p.wantWorked("1", consumer.ResultFailed); !report.Final || report.HandlerDuration != 0 {
		t.Errorf("reported %+v", report)
	}
	p.wantState("1", inbox.StateFailed, 1)
	p.wantLastError("1", "payload was removed")
	p.WantRows("1", 0, 1)
}

// A payload of no bytes is one.
func TestInboxWorksEmptyPayloads(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	p.run()
	if got := p.Post("k", ""); got.Status != http.StatusAccepted {
		t.Fatalf("got %d %s", got.Status, got.Body)
	}
	p.wantWorked("k", consumer.ResultProcessed)
}
