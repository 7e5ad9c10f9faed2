package inbox_test

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// A commit waits for the disk even where synchronous_commit is off, and as long as a stricter setting asks: the sender
// forgets what it was answered 202 for.
func TestInboxAnswerWaitsForTheDisk(t *testing.T) {
	t.Parallel()
	for set, want := range map[string]string{"off": "on", "on": "on", "local": "local", "remote_apply": "remote_apply"} {
		t.Run(set, func(t *testing.T) {
			t.Parallel()
			p := newInbox(t, inbox.Config{})
			p.SampleCommits("processed_events")
			p.MustExec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = ` + set + `', current_database()); END $$`)
			p.again(inbox.Config{}).record("k")
			p.WantCommit(want)
		})
	}
}

// The inbox's own process is woken at once: nothing here could happen by polling.
func TestInboxRecordsThenWorks(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{PollInterval: never})
	p.run()
	got := p.Post("k", "{}")
	if got.Status != http.StatusAccepted || got.Body != `{"state":"pending"}`+"\n" || got.Header.Get("Content-Type") != "application/json" {
		t.Errorf("got %d %q %v", got.Status, got.Body, got.Header)
	}
	report := p.WantResult(consumer.ResultRecorded)
	if report.Inbox || report.Status != 202 || report.Event.Key != "k" {
		t.Errorf("reported %+v", report)
	}
	report = p.wantWorked("k", consumer.ResultProcessed)
	if !report.Inbox || report.Status != 0 || report.Source != "outbox" || report.Duration <= 0 || report.HandlerDuration <= 0 {
		t.Errorf("reported %+v", report)
	}
	p.wantState("k", inbox.StateSucceeded, 1)
	p.WantRows("k", 1, 1)
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
		p.MustExec("UPDATE inbox_events SET processing_state = $1", string(state))
		before := p.row("k")
		receivertest.WantReplayed(t, p.Post("k", body), 200, `{"state":"`+string(state)+`"}`+"\n")
		if after := p.row("k"); after != before {
			t.Errorf("the duplicate changed\n%s to\n%s", before, after)
		}
		receivertest.WantProblem(t, p.Post("k", "{}"), 422, "key-reused")
	}
}

// row is all that is kept of an event.
func (p *inboxProcess) row(key string) (text string) {
	p.T.Helper()
	if err := p.Pool.QueryRow(p.T.Context(), `SELECT p::text || ' ' || e::text
		FROM processed_events p JOIN inbox_events e USING (source, idempotency_key) WHERE idempotency_key = $1`, key).Scan(&text); err != nil {
		p.T.Fatal(err)
	}
	return text
}

// wantInOrder asserts that the effects of each ordering key are in the order of its sequence.
func (p *inboxProcess) wantInOrder() {
	p.T.Helper()
	if bad := p.Count(`SELECT count(*) FROM (
		SELECT e.sequence < lag(e.sequence) OVER (PARTITION BY e.ordering_key ORDER BY f.number) AS backwards
		FROM effect f JOIN inbox_events e ON e.idempotency_key = f.key WHERE e.ordering_key IS NOT NULL) x WHERE backwards`); bad != 0 {
		p.T.Errorf("%d effects came after a later one of their key", bad)
	}
}

func TestInboxRetriesOnItsSchedule(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{
		Handle:       func(context.Context, pgx.Tx, consumer.Event) error { return receivertest.ErrHandler },
		Schedule:     []time.Duration{0, time.Hour},
		PollInterval: 20 * time.Millisecond,
	})
	p.run()
	p.record("k", receivertest.With(webhook.Attempt, "3"))
	for range 2 {
		if report := p.wantWorked("k", consumer.ResultFailed); report.Final || report.Err != receivertest.ErrHandler {
			t.Errorf("reported %+v", report)
		}
	}
	p.wantState("k", inbox.StatePending, 2)
	if n := p.Count(`SELECT count(*) FROM inbox_events
		WHERE next_attempt_at BETWEEN now() + interval '50 minutes' AND now() + interval '1 hour' AND last_error = $1`, receivertest.ErrHandler.Error()); n != 1 {
		t.Errorf("the next attempt is not in an hour: %s", p.row("k"))
	}
}

// A moment that is before the year 10000 in UTC is recorded so, wherever its sender lives.
func TestInboxRecordsMomentsInUTC(t *testing.T) {
	t.Parallel()
	last := time.UnixMilli(253402300799999).In(time.FixedZone("JST", 9*60*60))
	given := make(chan consumer.Event, 1)
	p := newInbox(t, inbox.Config{
		Config: consumer.Config{Verify: consumer.Verify{Custom: func(http.Header, []byte, time.Time) (consumer.Event, error) {
			return consumer.Event{Key: "k", Type: "t", NotAfter: last}, nil
		}}},
		Handle: func(_ context.Context, _ pgx.Tx, event consumer.Event) error { given <- event; return nil },
	})
	p.run()
	p.record("k")
	p.wantWorked("k", consumer.ResultProcessed)
	if event := <-given; !event.NotAfter.Equal(last) {
		t.Errorf("the handler got %v, want %v", event.NotAfter, last)
	}
}

// Where something else runs in the place of COMMIT, no event counts as recorded.
func TestInboxWhoseCommitIsAName(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	for _, stands := range []string{"SELECT 1", "ROLLBACK", rollsOn} {
		pool := p.configured(func(cfg *pgxpool.Config) {
			cfg.MaxConns = 2
			cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Prepare(ctx, "commit", stands)
				return err
			}
		})
		p.openOn(pool, inbox.Config{})
		for range 2 {
			receivertest.WantProblem(t, p.Post("k", "{}"), 503, "database-unavailable")
			p.WantRows("k", 0, 0)
		}
	}
}

// An event that comes from two destinations which lead to one inbox counts once. Of two receivers
// that were given one name, the second destination's event is refused.
func TestInboxOfTwoDestinations(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{Config: consumer.Config{Destinations: []string{"web", "stream"}}})
	p.record("k", receivertest.SentTo("web"))
	receivertest.WantReplayed(t, p.Do(p.NewRequest("k", `{"key":"k"}`, receivertest.SentTo("stream"))), http.StatusOK, `{"state":"pending"}`+"\n")
	same := p.again(inbox.Config{})
	receivertest.WantProblem(t, same.Do(same.NewRequest("k", "[]", receivertest.SentTo("chi"))), http.StatusMisdirectedRequest, "other-destination")
	other := p.again(inbox.Config{Config: consumer.Config{Receiver: "chi"}})
	other.record("k", receivertest.SentTo("chi"))
	p.run()
	other.run()
	p.wantWorked("k", consumer.ResultProcessed)
	other.wantWorked("k", consumer.ResultProcessed)
	if n := p.Count("SELECT count(*) FROM effect"); n != 2 {
		t.Errorf("%d effects, want 2", n)
	}
}
