package consumer_test

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
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
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// inboxProcess is what one process does with an inbox: it has a pool of its own.
type inboxProcess struct {
	*env
	inbox *inbox.Inbox
	own   *pgxpool.Pool
	stop  func() error // ends Run and returns what it returned
}

// inboxSchema is what the handlers of inboxes write: effects in the order in which they are committed.
const inboxSchema = `
CREATE TABLE effect (key text NOT NULL, number bigint GENERATED ALWAYS AS IDENTITY, at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (parent int REFERENCES parent DEFERRABLE INITIALLY DEFERRED);`

// newInbox is an inbox with a database of its own that records over HTTP. Nothing works its events before run.
func newInbox(t testing.TB, cfg inbox.Config) *inboxProcess {
	t.Helper()
	var p *inboxProcess
	e := newEnv(t, flavour{
		name: "inbox",
		wrap: func(t testing.TB, dsn string, c consumer.Config) func(http.Handler) http.Handler {
			return func(http.Handler) http.Handler { return http.NotFoundHandler() }
		},
	}, consumer.Config{}, func(*env) http.HandlerFunc { return nil })
	e.mustExec("DROP TABLE effect, child, parent")
	e.mustExec(inboxSchema)
	p = &inboxProcess{env: e}
	p.open(cfg)
	return p
}

// again is another process at the same database.
func (p *inboxProcess) again(cfg inbox.Config) *inboxProcess {
	p.t.Helper()
	e := *p.env
	e.reports, e.logged = make(chan consumer.Report, 10_000), &syncBuffer{}
	other := &inboxProcess{env: &e}
	other.open(cfg)
	return other
}

func (p *inboxProcess) open(cfg inbox.Config) {
	p.t.Helper()
	p.own = poolOf(p.t, p.dsn, 12)
	p.openOn(p.own, cfg)
}

func (p *inboxProcess) openOn(pool *pgxpool.Pool, cfg inbox.Config) {
	p.t.Helper()
	if cfg.Handle == nil {
		cfg.Handle = func(ctx context.Context, _ pgx.Tx, event consumer.Event) error { return effectOf(ctx, event.Key) }
	}
	cfg.Receiver = cmp.Or(cfg.Receiver, "test")
	if len(cfg.Secrets) == 0 && !cfg.AllowUnsigned && cfg.Verify == nil {
		cfg.Secrets = []string{secretText}
	}
	if cfg.Observe == nil {
		cfg.Observe = func(_ context.Context, r consumer.Report) { p.reports <- r }
	}
	if cfg.Jitter == nil {
		none := 0.0
		cfg.Jitter = &none
	}
	cfg.Logger = loggerTo(p.logged)
	p.reports = make(chan consumer.Report, 100_000)
	p.inbox = consumer.Must(inbox.New(pool, cfg))
	server := httptest.NewServer(p.inbox.Handler())
	p.t.Cleanup(server.Close)
	p.url, p.client = server.URL, server.Client()
	p.client.Timeout = patience
}

// run works events until the test ends, or until stop.
func (p *inboxProcess) run() {
	p.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	var result error
	running.Go(func() { result = p.inbox.Run(ctx) })
	p.stop = sync.OnceValue(func() error {
		cancel()
		running.Wait()
		return result
	})
	p.t.Cleanup(func() {
		if err := p.stop(); err != nil {
			p.t.Errorf("Run: %v", err)
		}
	})
}

// replay replays as an operator does who has the rights of this process, and returns how many events.
func (p *inboxProcess) replay(s inboxops.Selection) (int64, error) {
	p.t.Helper()
	b, err := inboxops.New(p.own).Replay(p.t.Context(), s, nil)
	return b.Done, err
}

// ignore is replay for what is of no concern.
func (p *inboxProcess) ignore(s inboxops.Selection) (int64, error) {
	p.t.Helper()
	b, err := inboxops.New(p.own).Ignore(p.t.Context(), s, nil)
	return b.Done, err
}

// effectOf is the ordinary handler's work.
func effectOf(ctx context.Context, key string) error {
	_, err := consumer.Tx(ctx).Exec(ctx, "INSERT INTO effect (key) VALUES ($1)", key)
	return err
}

// ordered puts an event into an ordering key.
func ordered(key string, sequence int) func(http.Header) {
	return func(h http.Header) {
		h.Set(webhook.OrderingKey, key)
		h.Set(webhook.Sequence, strconv.Itoa(sequence))
	}
}

// record brings an event, which must be new.
func (p *inboxProcess) record(key string, change ...func(http.Header)) {
	p.t.Helper()
	if got := p.do(p.newRequest(key, `{"key":"`+key+`"}`, change...)); got.status != http.StatusAccepted {
		p.t.Fatalf("recording %s: status %d, %s\n%s", key, got.status, got.body, p.logged)
	}
}

// worked waits for the next report of a worker.
func (p *inboxProcess) worked() consumer.Report {
	p.t.Helper()
	for {
		select {
		case report := <-p.reports:
			if report.Inbox {
				return report
			}
		case <-p.t.Context().Done():
			p.t.Fatal("no worker has reported")
		}
	}
}

func (p *inboxProcess) wantWorked(key string, want consumer.Result) consumer.Report {
	p.t.Helper()
	report := p.worked()
	if report.Event.Key != key || report.Result != want {
		p.t.Fatalf("%s: %s (%v), want %s: %s", report.Event.Key, report.Result, report.Err, key, want)
	}
	return report
}

func (p *inboxProcess) state(key string) (state inbox.State) {
	p.t.Helper()
	if err := p.pool.QueryRow(p.t.Context(), "SELECT processing_state FROM inbox_events WHERE idempotency_key = $1", key).Scan(&state); err != nil {
		p.t.Fatalf("state of %s: %v", key, err)
	}
	return state
}

func (p *inboxProcess) wantState(key string, want inbox.State, attempts int) {
	p.t.Helper()
	if got := p.state(key); got != want {
		p.t.Errorf("%s is %s, want %s", key, got, want)
	}
	if n := p.count("SELECT attempts FROM inbox_events WHERE idempotency_key = $1", key); n != attempts {
		p.t.Errorf("%s has %d attempts, want %d", key, n, attempts)
	}
}

func (p *inboxProcess) wantLastError(key, text string) {
	p.t.Helper()
	var got string
	if err := p.pool.QueryRow(p.t.Context(), "SELECT coalesce(last_error, '') FROM inbox_events WHERE idempotency_key = $1", key).Scan(&got); err != nil {
		p.t.Fatal(err)
	}
	if !strings.Contains(got, text) {
		p.t.Errorf("last_error of %s is %q, want it to say %q", key, got, text)
	}
}

// awaitState waits until an event is in a state.
func (p *inboxProcess) awaitState(key string, want inbox.State) {
	p.t.Helper()
	p.await("SELECT processing_state = $2 FROM inbox_events WHERE idempotency_key = $1", key, string(want))
}

var errHandler = errors.New("the handler is not pleased")

const never = time.Hour // as an interval: what needs it would hang

// poolOf is a pool of exactly n connections.
func poolOf(t testing.TB, dsn string, n int) *pgxpool.Pool {
	t.Helper()
	return pgtest.Pool(t, withSetting(dsn, "pool_max_conns", strconv.Itoa(n)))
}

func loggerTo(b *syncBuffer) *slog.Logger {
	return slog.New(slog.NewTextHandler(b, &slog.HandlerOptions{Level: slog.LevelDebug}))
}
