package inbox_test

import (
	"context"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// statements counts what a pool sends: every statement by itself and in batches.
type statements struct {
	mu  sync.Mutex // guards all
	all []string
}

func (s *statements) add(query string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, query)
}

func (s *statements) count(part string) (n, all int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, query := range s.all {
		if strings.Contains(query, part) {
			n++
		}
	}
	return n, len(s.all)
}

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s.add(data.SQL)
	return ctx
}

func (s *statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (s *statements) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

func (s *statements) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	s.add(data.SQL)
}

func (s *statements) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// An idle inbox asks one statement a second. What it does once, at its start and every half minute,
// is not much either.
func TestIdleInboxAsksLittle(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	seen := &statements{}
	idle := p.again(inbox.Config{})
	idle.openOn(p.configured(func(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer, cfg.MaxConns = seen, 4 }), inbox.Config{})
	idle.run()
	const looks = 4
	for n := 0; n < looks; n, _ = seen.count("claimed_at < now()") {
		p.Await("SELECT true")
	}
	// One claim at the start and one after LISTEN, one sweep of two transactions, each of BEGIN,
	// settings, statement, COMMIT.
	if _, all := seen.count(""); all > looks+1+4*4+1 {
		t.Errorf("%d statements within %d looks:\n%s", all, looks, strings.Join(seen.all, "\n"))
	}
}

// The rights in migrations/roles.sql are enough.
func TestInboxWithTheRightsOfAReceiver(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	pgtest.Exec(t, p.Pool, migrations.Roles(), pgx.QueryExecModeSimpleProtocol)
	p.MustExec("GRANT INSERT ON effect TO inbox_receiver")
	dsn, err := url.Parse(p.DSN)
	pgtest.Must(t, err)
	p.DSN = receivertest.WithSetting(dsn.String(), "role", "inbox_receiver")
	receiver := p.again(inbox.Config{OnFailure: inbox.FailureSkips})
	receiver.run()
	receiver.record("1", ordered("o", 1))
	receiver.record("2", ordered("o", 2))
	receiver.record("dead")
	receiver.awaitState("2", inbox.StateSucceeded)
	receiver.awaitState("dead", inbox.StateSucceeded)
	if n, err := receiver.replay(inboxops.Selection{States: []string{inboxops.Succeeded}}); n != 3 || err != nil {
		t.Errorf("replayed %d, %v", n, err)
	}
	p.Await("SELECT count(*) = 6 FROM effect")
	if log := receiver.Logged.String(); strings.Contains(log, "permission denied") {
		t.Error(log)
	}
}

// A login with CONNECT alone notifies in the name of an inbox as often as it can. The inbox claims
// a bounded number of times, and continues working.
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
