package consumer_test

import (
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A login with CONNECT alone notifies in the name of an inbox as often as it can. The inbox claims a bounded number of times,
// and goes on working.
func TestSecurityInboxNotificationsAreBounded(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	recorder := newInbox(t, inbox.Config{})
	u, err := url.Parse(recorder.dsn)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := pgxpool.ParseConfig(recorder.dsn)
	if err != nil {
		t.Fatal(err)
	}
	seen := &statements{}
	cfg.ConnConfig.Tracer = seen
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	worker := recorder.again(inbox.Config{})
	worker.openOn(pool, inbox.Config{PollInterval: never})
	worker.run()
	worker.listening(1)

	recorder.mustExec(`DO $$ BEGIN CREATE ROLE inbox_stranger LOGIN; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$`)
	u.User = url.User("inbox_stranger")
	stranger, err := pgx.Connect(t.Context(), u.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stranger.Close(t.Context()) })
	before, _ := seen.count("UPDATE inbox_events e\nSET processing_state = 'processing'")
	began := time.Now()
	const notifications = 5000
	for range notifications {
		if _, err := stranger.Exec(t.Context(), `SELECT pg_notify('inbox_wake', 'outbox')`); err != nil {
			t.Fatal(err)
		}
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
