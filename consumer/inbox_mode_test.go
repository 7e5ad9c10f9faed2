package consumer_test

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// The inbox's own process is woken at once: nothing here could happen by polling.
func TestInboxRecordsThenWorks(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{PollInterval: never})
	p.run()
	got := p.post("k", "{}")
	if got.status != http.StatusAccepted || got.body != `{"state":"pending"}`+"\n" || got.header.Get("Content-Type") != "application/json" {
		t.Errorf("got %d %q %v", got.status, got.body, got.header)
	}
	report := p.wantResult(consumer.ResultRecorded)
	if report.Inbox || report.Status != 202 || report.Event.Key != "k" {
		t.Errorf("reported %+v", report)
	}
	report = p.wantWorked("k", consumer.ResultProcessed)
	if !report.Inbox || report.Status != 0 || report.Source != "outbox" || report.Duration <= 0 || report.HandlerDuration <= 0 {
		t.Errorf("reported %+v", report)
	}
	p.wantState("k", inbox.StateSucceeded, 1)
	p.wantRows("k", 1, 1)
}

// Whatever becomes of an event, its duplicate is answered 200, changes nothing, and says what has become of it.
func TestInboxAnswersDuplicatesInEveryState(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	p.record("k")
	body := `{"key":"k"}`
	for _, state := range []inbox.State{
		inbox.StatePending, inbox.StateProcessing, inbox.StateSucceeded, inbox.StateIgnored, inbox.StateFailed,
	} {
		p.mustExec("UPDATE inbox_events SET processing_state = $1", string(state))
		before := p.row("k")
		wantReplayed(t, p.post("k", body), 200, `{"state":"`+string(state)+`"}`+"\n")
		if after := p.row("k"); after != before {
			t.Errorf("the duplicate changed\n%s to\n%s", before, after)
		}
		wantProblem(t, p.post("k", "{}"), 422, "key-reused")
	}
}

// row is all that is kept of an event.
func (p *inboxProcess) row(key string) (text string) {
	p.t.Helper()
	if err := p.pool.QueryRow(p.t.Context(), `SELECT p::text || ' ' || e::text
		FROM processed_events p JOIN inbox_events e USING (source, idempotency_key) WHERE idempotency_key = $1`, key).Scan(&text); err != nil {
		p.t.Fatal(err)
	}
	return text
}

func TestManyEventsAreWorkedOnceByTwoProcesses(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{Workers: 4})
	other := p.again(inbox.Config{Workers: 4})
	p.run()
	other.run()
	n := testsize.Of(300, 120)
	var posting sync.WaitGroup
	for lane := range 6 {
		posting.Go(func() {
			for i := range n / 6 {
				at := p
				if i%2 == 0 {
					at = other
				}
				key := fmt.Sprintf("%d-%d", lane, i)
				if got, err := at.try(at.newRequest(key, "{}", ordered(fmt.Sprint("o", lane), i+1))); err != nil || got.status != 202 {
					t.Errorf("%s: %+v, %v", key, got, err)
				}
			}
		})
	}
	posting.Wait()
	p.await("SELECT count(*) = $1 FROM inbox_events WHERE processing_state = 'succeeded'", n)
	if bad := p.count(`SELECT count(*) FROM (SELECT key FROM effect GROUP BY key HAVING count(*) <> 1) x`); bad != 0 {
		t.Errorf("%d events did not have one effect", bad)
	}
	p.wantInOrder()
}

// wantInOrder asserts that the effects of each ordering key are in the order of its sequence.
func (p *inboxProcess) wantInOrder() {
	p.t.Helper()
	if bad := p.count(`SELECT count(*) FROM (
		SELECT e.sequence < lag(e.sequence) OVER (PARTITION BY e.ordering_key ORDER BY f.number) AS backwards
		FROM effect f JOIN inbox_events e ON e.idempotency_key = f.key WHERE e.ordering_key IS NOT NULL) x WHERE backwards`); bad != 0 {
		p.t.Errorf("%d effects came after a later one of their key", bad)
	}
}

func TestInboxRetriesOnItsSchedule(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{
		Handle:       func(context.Context, pgx.Tx, consumer.Event) error { return errHandler },
		Schedule:     []time.Duration{0, time.Hour},
		PollInterval: 20 * time.Millisecond,
	})
	p.run()
	p.record("k", with(webhook.Attempt, "3"))
	for range 2 {
		if report := p.wantWorked("k", consumer.ResultFailed); report.Final || report.Err != errHandler {
			t.Errorf("reported %+v", report)
		}
	}
	p.wantState("k", inbox.StatePending, 2)
	if n := p.count(`SELECT count(*) FROM inbox_events
		WHERE next_attempt_at BETWEEN now() + interval '50 minutes' AND now() + interval '1 hour' AND last_error = $1`, errHandler.Error()); n != 1 {
		t.Errorf("the next attempt is not in an hour: %s", p.row("k"))
	}
}

// A moment that is before the year 10000 in UTC is recorded so, wherever its sender lives.
func TestInboxRecordsMomentsInUTC(t *testing.T) {
	t.Parallel()
	last := time.UnixMilli(253402300799999).In(time.FixedZone("JST", 9*60*60))
	given := make(chan consumer.Event, 1)
	p := newInbox(t, inbox.Config{
		Config: consumer.Config{Verify: func(http.Header, []byte, time.Time) (consumer.Event, error) {
			return consumer.Event{Key: "k", Type: "t", NotAfter: last}, nil
		}},
		Handle: func(_ context.Context, _ pgx.Tx, event consumer.Event) error { given <- event; return nil },
	})
	p.run()
	p.record("k")
	p.wantWorked("k", consumer.ResultProcessed)
	if event := <-given; !event.NotAfter.Equal(last) {
		t.Errorf("the handler got %v, want %v", event.NotAfter, last)
	}
}
