package inbox_test

import (
	"context"
	"net/http"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// wantRemembered asserts that the memory knows an event as recorded, and says nothing else of what
// has become of it.
func (p *inboxProcess) wantRemembered(key string) {
	p.T.Helper()
	const query = `SELECT count(*) FROM processed_events WHERE idempotency_key = $1 AND processing_state = 'recorded' AND attempts = 0
		AND num_nonnulls(processed_at, next_attempt_at, last_error, response_status, payload) = 0`
	if n := p.Count(query, key); n != 1 {
		p.T.Errorf("%s is remembered %d times as recorded, want once", key, n)
	}
}

// The memory of an event says from the beginning what it says for ever, whatever becomes of the
// event.
func TestMemoryOfWhatIsRecordedIsWrittenOnce(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{
		Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
			switch event.IdempotencyKey {
			case "failed":
				return consumer.Permanent(receivertest.ErrHandler)
			case "ignored":
				return consumer.Ignore("no concern")
			}
			return receivertest.EffectOf(ctx, event.IdempotencyKey)
		},
	})
	keys := []string{"succeeded", "failed", "ignored"}
	for i, key := range keys {
		p.record(key, ordered(key, i+1), receivertest.With(webhook.EventID, "7"), receivertest.With(webhook.RelatedReference, "INV-7"), receivertest.With(webhook.EventVersion, "3"))
	}
	const written = "SELECT idempotency_key || ctid::text || xmin::text || xmax::text FROM processed_events ORDER BY 1"
	before := tableRows(p.Env, written)
	p.run()
	for _, key := range keys {
		p.awaitState(key, inbox.State(key))
		p.wantRemembered(key)
	}
	if _, err := p.replay(inboxops.Selection{States: []string{inboxops.Succeeded}}); err != nil {
		t.Fatal(err)
	}
	p.Await("SELECT count(*) = 2 FROM effect")
	if after := tableRows(p.Env, written); !slices.Equal(after, before) {
		t.Errorf("the memory was %q, and is %q", before, after)
	}
	if n := p.Count(`SELECT count(*) FROM processed_events p
		JOIN inbox_events e USING (source, idempotency_key, event_type, event_version, related_reference, event_id, received_at)
		WHERE p.payload_hash = sha256(e.payload) AND event_type = 'invoice.created' AND event_version = 3 AND related_reference = 'INV-7' AND event_id = 7`); n != len(keys) {
		t.Errorf("%d events are remembered as they are in the inbox, want %d", n, len(keys))
	}
}

// An event that comes by both ways counts once, whichever was first.
func TestEventByMiddlewareAndInbox(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		p := newInbox(t, inbox.Config{})
		m := receivertest.NewHandlerEnvAt(t, f, p.DSN, consumer.Config{}, func(e *receivertest.Env) receivertest.HandlerFunc {
			return func(ctx context.Context, event consumer.Event) error {
				if event.IdempotencyKey == "ignored" {
					return consumer.Ignore("no concern")
				}
				return e.Exec(ctx, "INSERT INTO effect VALUES ($1)", event.IdempotencyKey)
			}
		})

		receivertest.WantFirst(t, m.Post("first", "{}"), 204, "")
		receivertest.WantFirst(t, m.Post("ignored", "{}"), 204, "")
		p.run()
		receivertest.WantReplayed(t, p.Post("first", "{}"), 200, `{"state":"succeeded"}`+"\n")
		receivertest.WantReplayed(t, p.Post("ignored", "{}"), 200, `{"state":"ignored"}`+"\n")
		receivertest.WantProblem(t, p.Post("first", "[]"), 422, "key-reused")
		pgtest.Must(t, p.stop())
		testkit.Equal(t, "events in the inbox that the middleware had processed", p.Count("SELECT count(*) FROM inbox_events"), 0)

		p.record("second", ordered("o", 1))
		body := `{"key":"second"}`
		receivertest.WantReplayed(t, m.Post("second", body), 200, "")
		receivertest.WantProblem(t, m.Post("second", "[]"), 422, "key-reused")
		if first, err := m.Once(t.Context(), m, "outbox", "second", func() {}); first || err != nil {
			t.Errorf("Once: %v, %v", first, err)
		}
		p.run()
		p.awaitState("second", inbox.StateSucceeded)
		receivertest.WantReplayed(t, m.Post("second", body), 200, "")
		p.WantRows("first", 1, 1)
		p.WantRows("second", 1, 1)
	})
}

// Where the memory of events was removed by hand, and they come again, those that are still in the
// inbox are remembered again, and stay as they are.
func TestMemoryRemovedByHand(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	events := []struct {
		key    string
		change []func(http.Header)
	}{{"alone", nil}, {"1", []func(http.Header){ordered("o", 1)}}, {"2", []func(http.Header){ordered("o", 2)}}}
	for _, e := range events {
		p.record(e.key, e.change...)
	}
	const in = "SELECT e::text FROM inbox_events e ORDER BY 1"
	again := func(want inbox.State) {
		t.Helper()
		before := tableRows(p.Env, in)
		p.MustExec("DELETE FROM processed_events")
		for _, e := range events {
			for range 2 {
				receivertest.WantReplayed(t, p.Do(p.NewRequest(e.key, `{"key":"`+e.key+`"}`, e.change...)), 200, `{"state":"`+string(want)+`"}`+"\n")
				p.wantRemembered(e.key)
			}
			receivertest.WantProblem(t, p.Do(p.NewRequest(e.key, "{}", e.change...)), 422, "key-reused")
		}
		if after := tableRows(p.Env, in); !slices.Equal(after, before) {
			t.Errorf("in the inbox was %q, and is %q", before, after)
		}
	}
	again(inbox.StatePending)
	p.run()
	p.Await("SELECT count(*) = 3 FROM inbox_events WHERE processing_state = 'succeeded' AND attempts = 1")
	again(inbox.StateSucceeded)
	for _, e := range events {
		p.WantRows(e.key, 1, 1)
	}
	p.wantInOrder()
}

// What was removed from the inbox by hand is still known. It is not worked, and what became of it
// is not known.
func TestEventRemovedFromTheInboxByHand(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	m := receivertest.NewEnvAt(t, receivertest.PGX(), p.DSN, consumer.Config{}, receivertest.Effect)
	p.record("waits", ordered("o", 1))
	p.MustExec("DELETE FROM inbox_events")
	p.run()
	p.record("done", ordered("o", 2))
	p.awaitState("done", inbox.StateSucceeded)
	p.MustExec("DELETE FROM inbox_events")
	for key, effects := range map[string]int{"waits": 0, "done": 1} {
		body := `{"key":"` + key + `"}`
		receivertest.WantReplayed(t, p.Do(p.NewRequest(key, body, ordered("o", 1))), 200, `{"state":"recorded"}`+"\n")
		receivertest.WantReplayed(t, m.Post(key, body), 200, "")
		receivertest.WantProblem(t, p.Post(key, "{}"), 422, "key-reused")
		p.wantRemembered(key)
		p.WantRows(key, effects, 1)
	}
	if n, err := p.replay(inboxops.Selection{Key: "done"}); n != 0 || err != nil {
		t.Errorf("replayed %d, %v", n, err)
	}
	testkit.Equal(t, "events in the inbox again", p.Count("SELECT count(*) FROM inbox_events"), 0)
	p.record("next", ordered("o", 3)) // its ordering key continues
	p.awaitState("next", inbox.StateSucceeded)
}
