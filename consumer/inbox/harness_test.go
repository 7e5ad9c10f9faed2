package inbox_test

import (
	"cmp"
	"context"
	"flag"
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
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestMain(m *testing.M) {
	flag.Parse()
	runMoreAtOnce()
	receivertest.RunTests(m, map[string]func(p *receivertest.Player){
		"work-die": workAndDie,
		"work":     workForBenchmark,
	})
}

// runMoreAtOnce doubles -parallel, unless it is 1. Nearly all tests of this package wait: for locks
// that time out, and for the looks at workers that have died.
func runMoreAtOnce() {
	parallel := flag.Lookup("test.parallel").Value
	if n, err := strconv.Atoi(parallel.String()); err == nil && n > 1 {
		_ = parallel.Set(strconv.Itoa(2 * n))
	}
}

// inboxProcess is what one process does with an inbox: it has its own pool.
type inboxProcess struct {
	*receivertest.Env
	inbox *inbox.Inbox
	own   *pgxpool.Pool
	stop  func() error // ends Run and returns what it returned
}

// inboxSchema is what the handlers of inboxes write: effects in the order in which they are
// committed.
const inboxSchema = `
CREATE TABLE effect (key text NOT NULL, number bigint GENERATED ALWAYS AS IDENTITY, at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE parent (id int PRIMARY KEY);
CREATE TABLE child (parent int REFERENCES parent DEFERRABLE INITIALLY DEFERRED);`

// newInbox is an inbox with its own database that records over HTTP. Nothing works its events
// before run.
func newInbox(t testing.TB, cfg inbox.Config) *inboxProcess {
	t.Helper()
	dsn := pgtest.New(t, migrations.Inbox)
	p := &inboxProcess{Env: &receivertest.Env{T: t, DSN: dsn, Pool: pgtest.Pool(t, dsn), Logged: &testkit.Buffer{}}}
	p.MustExec(inboxSchema)
	p.open(cfg)
	return p
}

// again is another process at the same database.
func (p *inboxProcess) again(cfg inbox.Config) *inboxProcess {
	p.T.Helper()
	e := *p.Env
	e.Logged = &testkit.Buffer{}
	other := &inboxProcess{Env: &e}
	other.open(cfg)
	return other
}

func (p *inboxProcess) open(cfg inbox.Config) {
	p.T.Helper()
	p.own = receivertest.PoolOf(p.T, p.DSN, 12)
	p.openOn(p.own, cfg)
}

// configured returns a pool of the test's database that is not as others are.
func (p *inboxProcess) configured(change func(*pgxpool.Config)) *pgxpool.Pool {
	p.T.Helper()
	return pgtest.PoolWith(p.T, p.DSN, change)
}

func (p *inboxProcess) openOn(pool *pgxpool.Pool, cfg inbox.Config) {
	p.T.Helper()
	if cfg.Handle == nil {
		cfg.Handle = func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
			return receivertest.EffectOf(ctx, event.IdempotencyKey)
		}
	}
	cfg.Config.Receiver = cmp.Or(cfg.Config.Receiver, "test")
	if len(cfg.Config.Secrets) == 0 && !cfg.Config.Verify.AllowUnsigned && cfg.Config.Verify.Custom == nil {
		cfg.Config.Secrets = []string{receivertest.SecretText}
	}
	if cfg.Config.Observe == nil {
		cfg.Config.Observe = func(_ context.Context, r consumer.Report) { p.Reports <- r }
	}
	if cfg.Jitter == nil {
		none := 0.0
		cfg.Jitter = &none
	}
	cfg.Config.Logger = loggerTo(p.Logged)
	p.Reports = make(chan consumer.Report, 100_000)
	p.inbox = receivertest.Must(inbox.New(pool, cfg))
	server := httptest.NewServer(p.inbox.Handler())
	p.T.Cleanup(server.Close)
	p.URL, p.Client = server.URL, server.Client()
	p.Client.Timeout = receivertest.Patience
}

// run works events until the test ends, or until stop.
func (p *inboxProcess) run() {
	p.T.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	var result error
	running.Go(func() { result = p.inbox.Run(ctx) })
	p.stop = sync.OnceValue(func() error {
		cancel()
		running.Wait()
		return result
	})
	p.T.Cleanup(func() {
		if err := p.stop(); err != nil {
			p.T.Errorf("Run: %v", err)
		}
	})
}

// replay replays as an operator does who has the rights of this process, and returns how many
// events.
func (p *inboxProcess) replay(s inboxops.Selection) (int64, error) {
	p.T.Helper()
	b, err := inboxops.New(p.own).Replay(p.T.Context(), s, nil)
	return b.Done, err
}

// ignore is replay for what is of no concern.
func (p *inboxProcess) ignore(s inboxops.Selection) (int64, error) {
	p.T.Helper()
	b, err := inboxops.New(p.own).Ignore(p.T.Context(), s, nil)
	return b.Done, err
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
	p.T.Helper()
	if got := p.Do(p.NewRequest(key, `{"key":"`+key+`"}`, change...)); got.Status != http.StatusAccepted {
		p.T.Fatalf("recording %s: status %d, %s\n%s", key, got.Status, got.Body, p.Logged)
	}
}

// worked waits for the next report of a worker.
func (p *inboxProcess) worked() consumer.Report {
	p.T.Helper()
	for {
		select {
		case report := <-p.Reports:
			if report.Inbox {
				return report
			}
		case <-p.T.Context().Done():
			p.T.Fatal("no worker has reported")
		}
	}
}

func (p *inboxProcess) wantWorked(key string, want consumer.Result) consumer.Report {
	p.T.Helper()
	report := p.worked()
	if report.Event.IdempotencyKey != key || report.Result != want {
		p.T.Fatalf("%s: %s (%v), want %s: %s", report.Event.IdempotencyKey, report.Result, report.Err, key, want)
	}
	return report
}

func (p *inboxProcess) state(key string) (state inbox.State) {
	p.T.Helper()
	if err := p.Pool.QueryRow(p.T.Context(), "SELECT processing_state FROM inbox_events WHERE idempotency_key = $1", key).Scan(&state); err != nil {
		p.T.Fatalf("state of %s: %v", key, err)
	}
	return state
}

func (p *inboxProcess) wantState(key string, want inbox.State, attempts int) {
	p.T.Helper()
	if got := p.state(key); got != want {
		p.T.Errorf("%s is %s, want %s", key, got, want)
	}
	if n := p.Count("SELECT attempts FROM inbox_events WHERE idempotency_key = $1", key); n != attempts {
		p.T.Errorf("%s has %d attempts, want %d", key, n, attempts)
	}
}

func (p *inboxProcess) wantLastError(key, text string) {
	p.T.Helper()
	got := pgtest.Row[string](p.T, p.Pool, "SELECT coalesce(last_error, '') FROM inbox_events WHERE idempotency_key = $1", key)
	if !strings.Contains(got, text) || (got == "") != (text == "") {
		p.T.Errorf("last_error of %s is %q, want it to say %q", key, got, text)
	}
}

// awaitState waits until an event is in a state.
func (p *inboxProcess) awaitState(key string, want inbox.State) {
	p.T.Helper()
	p.Await("SELECT processing_state = $2 FROM inbox_events WHERE idempotency_key = $1", key, string(want))
}

const never = time.Hour // as an interval: what needs it would hang

func loggerTo(b *testkit.Buffer) *slog.Logger {
	return slog.New(slog.NewTextHandler(b, &slog.HandlerOptions{Level: slog.LevelDebug}))
}
