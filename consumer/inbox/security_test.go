package inbox_test

import (
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A login with CONNECT alone notifies in the name of an inbox as often as it can. The inbox claims a bounded number of times,
// and goes on working.
func TestSecurityInboxNotificationsAreBounded(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	recorder := newInbox(t, inbox.Config{})
	u, err := url.Parse(recorder.DSN)
	pgtest.Must(t, err)
	seen := &statements{}
	worker := recorder.again(inbox.Config{})
	worker.openOn(recorder.configured(func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = seen }), inbox.Config{PollInterval: never})
	worker.run()
	worker.listening(1)

	recorder.MustExec(`DO $$ BEGIN CREATE ROLE inbox_stranger LOGIN; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$`)
	u.User = url.User("inbox_stranger")
	stranger, err := pgx.Connect(t.Context(), u.String())
	pgtest.Must(t, err)
	t.Cleanup(func() { _ = stranger.Close(t.Context()) })
	before, _ := seen.count("UPDATE inbox_events e\nSET processing_state = 'processing'")
	began := time.Now()
	const notifications = 5000
	for range notifications {
		pgtest.Exec(t, stranger, `SELECT pg_notify('inbox_wake', 'outbox')`)
	}
	recorder.record("key")
	worker.wantWorked("key", consumer.ResultProcessed)
	took := time.Since(began)
	after, _ := seen.count("UPDATE inbox_events e\nSET processing_state = 'processing'")
	t.Logf("%d claims in %s of %d notifications", after-before, took, notifications)
	if most := int(20 + 60*took.Seconds()); after-before > most {
		t.Errorf("%d claims in %s, want at most %d", after-before, took, most)
	}
}

// Secrets stay in a form that cannot be printed.
func TestSecurityInboxSecretsAreNotPrinted(t *testing.T) {
	t.Parallel()
	in := newInbox(t, inbox.Config{}).inbox
	receivertest.WantNoSecret(t, in)
	receivertest.WantNoSecret(t, in.Handler())
}

// Any login may take the advisory lock of a key that it knows. No event waits for it.
func TestSecurityInboxStrangersLockKeepsNoEvent(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	p.StrangerLocksKey()
	if got := p.Post("k", "{}"); got.Status != http.StatusAccepted {
		t.Errorf("answered %d %s", got.Status, got.Body)
	}
}
