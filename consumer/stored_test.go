package consumer_test

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/internal/message"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A message may wait in a log for longer than a signature's tolerance: what counts is when the log took it.
func TestMessagesOfALog(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.New(t, migrations.Inbox))
	secret := receivertest.Secret()
	sent := time.Now().Add(-20 * time.Hour)
	for name, c := range map[string]struct {
		stored time.Time
		handle error
		abort  bool
		lower  bool
		want   message.Outcome
	}{
		"stored when it was sent":      {stored: sent.Add(time.Second), want: message.Outcome{Status: 204}},
		"names in lower case":          {stored: sent, lower: true, want: message.Outcome{Status: 204}},
		"stored long after it":         {stored: sent.Add(time.Hour), want: message.Outcome{Verdict: message.Again, Status: 401, Problem: "timestamp-out-of-tolerance"}},
		"the handler refuses for good": {stored: sent, handle: consumer.Permanent(errors.New("never")), want: message.Outcome{Verdict: message.Refused, Status: 422, Problem: "permanent-failure"}},
		"the handler fails":            {stored: sent, handle: errors.New("not now"), want: message.Outcome{Verdict: message.Again, Status: 500, Problem: "handler-failed"}},
		"the handler asks for later":   {stored: sent, handle: consumer.RetryAfter(errors.New("later"), time.Minute), want: message.Outcome{Verdict: message.Again, Status: 503, Problem: "retry-later", Wait: time.Minute}},
		"the handler aborts":           {stored: sent, abort: true, want: message.Outcome{Verdict: message.Again}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			header := http.Header{}
			header.Set(webhook.IdempotencyKey, name)
			header.Set("X-Outbox-Event-Type", "test")
			webhook.Sign(header, []byte("{}"), sent, secret)
			if c.lower {
				header["x-idempotency-key"] = header[webhook.IdempotencyKey]
				delete(header, webhook.IdempotencyKey)
			}
			receive := receivertest.Must(consumer.New(pool, consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}}, func(context.Context, pgx.Tx, consumer.Event) error {
				if c.abort {
					panic(http.ErrAbortHandler)
				}
				return c.handle
			}))
			got := message.Deliver(t.Context(), receive, message.Message{Header: header, Body: []byte("{}"), Stored: c.stored})
			got.Detail = ""
			if got != c.want {
				t.Errorf("outcome is %+v, want %+v", got, c.want)
			}
		})
	}
}
