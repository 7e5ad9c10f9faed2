package consumer_test

import (
	"context"
	"net/http"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// wantRemembered asserts that the memory knows an event as recorded, and says nothing else of what has become of it.
func (p *inboxProcess) wantRemembered(key string) {
	p.t.Helper()
	const query = `SELECT count(*) FROM processed_events WHERE idempotency_key = $1 AND processing_state = 'recorded' AND attempts = 0
		AND num_nonnulls(processed_at, next_attempt_at, last_error, response_status, payload) = 0`
	if n := p.count(query, key); n != 1 {
		p.t.Errorf("%s is remembered %d times as recorded, want once", key, n)
	}
}

// The memory of an event says from the beginning what it says for ever, whatever becomes of the event.
func TestMemoryOfWhatIsRecordedIsWrittenOnce(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{
		Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
			switch event.Key {
			case "failed":
				return consumer.Permanent(errHandler)
			case "ignored":
				return consumer.Ignore("no concern")
			}
			return effectOf(ctx, event.Key)
		},
	})
	keys := []string{"succeeded", "failed", "ignored"}
	for i, key := range keys {
		p.record(key, ordered(key, i+1), with(webhook.EventID, "7"), with(webhook.RelatedReference, "INV-7"), with(webhook.EventVersion, "3"))
	}
	const written = "SELECT idempotency_key || ctid::text || xmin::text || xmax::text FROM processed_events ORDER BY 1"
	before := p.rows(written)
	p.run()
	for _, key := range keys {
		p.awaitState(key, inbox.State(key))
		p.wantRemembered(key)
	}
	if _, err := p.replay(inboxops.Selection{States: []string{inboxops.Succeeded}}); err != nil {
		t.Fatal(err)
	}
	p.await("SELECT count(*) = 2 FROM effect")
	if after := p.rows(written); !slices.Equal(after, before) {
		t.Errorf("the memory was %q, and is %q", before, after)
	}
	if n := p.count(`SELECT count(*) FROM processed_events p
		JOIN inbox_events e USING (source, idempotency_key, event_type, event_version, related_reference, event_id, received_at)
		WHERE p.payload_hash = sha256(e.payload) AND event_type = 'invoice.created' AND event_version = 3 AND related_reference = 'INV-7' AND event_id = 7`); n != len(keys) {
		t.Errorf("%d events are remembered as they are in the inbox, want %d", n, len(keys))
	}
}

// An event that comes by both ways counts once, whichever was first.
func TestEventByMiddlewareAndInbox(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		p := newInbox(t, inbox.Config{})
		m := newHandlerEnvAt(t, f, p.dsn, consumer.Config{}, func(e *env) handlerFunc {
			return func(ctx context.Context, event consumer.Event) error {
				if event.Key == "ignored" {
					return consumer.Ignore("no concern")
				}
				return e.exec(ctx, "INSERT INTO effect VALUES ($1)", event.Key)
			}
		})

		wantFirst(t, m.post("first", "{}"), 204, "")
		wantFirst(t, m.post("ignored", "{}"), 204, "")
		p.run()
		wantReplayed(t, p.post("first", "{}"), 200, `{"state":"succeeded"}`+"\n")
		wantReplayed(t, p.post("ignored", "{}"), 200, `{"state":"ignored"}`+"\n")
		wantProblem(t, p.post("first", "[]"), 422, "key-reused")
		if err := p.stop(); err != nil {
			t.Fatal(err)
		}
		if n := p.count("SELECT count(*) FROM inbox_events"); n != 0 {
			t.Errorf("%d events are in the inbox that the middleware had processed", n)
		}

		p.record("second", ordered("o", 1))
		body := `{"key":"second"}`
		wantReplayed(t, m.post("second", body), 200, "")
		wantProblem(t, m.post("second", "[]"), 422, "key-reused")
		if first, err := m.once(t.Context(), m, "outbox", "second", func() {}); first || err != nil {
			t.Errorf("Once: %v, %v", first, err)
		}
		p.run()
		p.awaitState("second", inbox.StateSucceeded)
		wantReplayed(t, m.post("second", body), 200, "")
		p.wantRows("first", 1, 1)
		p.wantRows("second", 1, 1)
	})
}

// Where the memory of events was removed by hand, and they come again, those that are still in the inbox are
// remembered again, and stay as they are.
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
		before := p.rows(in)
		p.mustExec("DELETE FROM processed_events")
		for _, e := range events {
			for range 2 {
				wantReplayed(t, p.do(p.newRequest(e.key, `{"key":"`+e.key+`"}`, e.change...)), 200, `{"state":"`+string(want)+`"}`+"\n")
				p.wantRemembered(e.key)
			}
			wantProblem(t, p.do(p.newRequest(e.key, "{}", e.change...)), 422, "key-reused")
		}
		if after := p.rows(in); !slices.Equal(after, before) {
			t.Errorf("in the inbox was %q, and is %q", before, after)
		}
	}
	again(inbox.StatePending)
	p.run()
	p.await("SELECT count(*) = 3 FROM inbox_events WHERE processing_state = 'succeeded' AND attempts = 1")
	again(inbox.StateSucceeded)
	for _, e := range events {
		p.wantRows(e.key, 1, 1)
	}
	p.wantInOrder()
}

// What was removed from the inbox by hand is still known. It is not worked, and what became of it is not known.
func TestEventRemovedFromTheInboxByHand(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	m := newEnvAt(t, flavours[0], p.dsn, consumer.Config{}, effect)
	p.record("waits", ordered("o", 1))
	p.mustExec("DELETE FROM inbox_events")
	p.run()
	p.record("done", ordered("o", 2))
	p.awaitState("done", inbox.StateSucceeded)
	p.mustExec("DELETE FROM inbox_events")
	for key, effects := range map[string]int{"waits": 0, "done": 1} {
		body := `{"key":"` + key + `"}`
		wantReplayed(t, p.do(p.newRequest(key, body, ordered("o", 1))), 200, `{"state":"recorded"}`+"\n")
		wantReplayed(t, m.post(key, body), 200, "")
		wantProblem(t, p.post(key, "{}"), 422, "key-reused")
		p.wantRemembered(key)
		p.wantRows(key, effects, 1)
	}
	if n, err := p.replay(inboxops.Selection{Key: "done"}); n != 0 || err != nil {
		t.Errorf("replayed %d, %v", n, err)
	}
	if n := p.count("SELECT count(*) FROM inbox_events"); n != 0 {
		t.Errorf("%d events are in the inbox again", n)
	}
	p.record("next", ordered("o", 3)) // its ordering key goes on
	p.awaitState("next", inbox.StateSucceeded)
}
