package consumer_test

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// answers are those for which the memory of an event is closed in different ways.
var answers = map[string]http.HandlerFunc{
	"204":    func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) },
	"201":    func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) },
	"ignore": nil, // the event is ignored: see newAnswering
}

// newAnswering is newEnv for a handler that ends with one of the answers.
func newAnswering(t testing.TB, f flavour, dsn string, answer http.HandlerFunc, handler func(answer http.HandlerFunc) func(e *env) http.HandlerFunc) (e *env) {
	t.Helper()
	if answer == nil {
		e = newHandlerEnvAt(t, f, dsn, consumer.Config{}, ignoring(handler(func(http.ResponseWriter, *http.Request) {})))
	} else {
		e = newEnvAt(t, f, dsn, consumer.Config{}, handler(answer))
	}
	e.mustExec(schema)
	return e
}

// sending is a handler that runs those of the request's Test-Statement headers after its effect.
func sending(answer http.HandlerFunc) func(e *env) http.HandlerFunc {
	return func(e *env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			effect(e)(discardWriter{}, r)
			for _, statement := range r.Header["Test-Statement"] {
				if err := e.exec(r.Context(), statement); err != nil && !strings.Contains(err.Error(), "keeps its row") {
					e.t.Error(err)
				}
			}
			answer(w, r)
		}
	}
}

func running(all ...string) func(http.Header) {
	return func(h http.Header) {
		h["Test-Statement"] = all
		h.Set(webhook.RelatedReference, "customer 42")
	}
}

// An effect whose event is not remembered would come again with every request.
func TestHandlerThatRemovesItsOwnMemory(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, answer := range answers {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := newAnswering(t, f, pgtest.New(t, migrations.Inbox), answer, sending)
				for _, statement := range []string{
					"DELETE FROM processed_events WHERE related_reference = 'customer 42'",
					"WITH gone AS (DELETE FROM public.\"processed_events\" RETURNING 1) SELECT count(*) FROM gone",
					"UPDATE Processed_Events SET idempotency_key = 'anonymous'",
					"TRUNCATE processed_events",
				} {
					for range 2 {
						// The handler minds no errors.
						wantProblem(t, e.do(e.newRequest("k", "{}", running(statement))), 500, "commit-failed")
						report := e.wantResult(consumer.ResultCommitFailed)
						if report.Err == nil || !strings.Contains(report.Err.Error(), "a statement of the handler failed and the handler answered 2xx all the same") {
							t.Errorf("%s: reported %v", statement, report.Err)
						}
						e.wantRows("k", 0, 0)
					}
				}
				// What is personal in the row may go: it is the same row.
				got := e.do(e.newRequest("k", "{}", running("UPDATE processed_events SET related_reference = NULL WHERE related_reference = 'customer 42'")))
				if got.status/100 != 2 || got.header.Get(webhook.Replayed) != "" {
					t.Errorf("answered %d %s", got.status, got.body)
				}
				wantReplayed(t, e.post("k", "{}"), got.status, "")
				e.wantRows("k", 1, 1)
			})
		}
	})
}

// A handler may leave the transaction where processed_events is another table, or none. One that leaves it to a role without the
// right is told so, and nothing of it stays.
func TestHandlerThatLeavesMemoryOutOfReach(t *testing.T) {
	const away, back = "SET LOCAL search_path = tenant, public", "SET LOCAL search_path = public"
	cases := map[string]struct {
		statements []string
		problem    string // empty: it is as any other handler
	}{
		"another schema with a table of that name":   {[]string{"CREATE TABLE IF NOT EXISTS tenant.processed_events (LIKE processed_events)", away}, ""},
		"another schema without one":                 {[]string{"SET LOCAL search_path = tenant"}, ""},
		"a role that may not read it":                {[]string{"SET LOCAL ROLE pg_monitor"}, "commit-failed"},
		"another schema, put back":                   {[]string{away, back}, ""},
		"another schema before that of the table":    {[]string{away}, ""},
		"another role, put back":                     {[]string{"SET LOCAL ROLE pg_monitor", "RESET ROLE"}, ""},
		"another schema for the time of a savepoint": {[]string{"SAVEPOINT s", away, "ROLLBACK TO s"}, ""},
	}
	eachFlavour(t, func(t *testing.T, f flavour) {
		for name, answer := range answers {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := newAnswering(t, f, pgtest.New(t, migrations.Inbox), answer, sending)
				e.mustExec("CREATE SCHEMA tenant")
				for key, test := range cases {
					key = strings.ReplaceAll(key, " ", "-")
					for range 2 {
						got := e.do(e.newRequest(key, "{}", running(test.statements...)))
						report := <-e.reports
						if test.problem == "" {
							if got.status/100 != 2 {
								t.Errorf("%s: answered %d %s (%v)", key, got.status, got.body, report.Err)
							}
							e.wantRows(key, 1, 1)
							continue
						}
						wantProblem(t, got, 500, test.problem)
						if report.Result != consumer.ResultCommitFailed || !strings.Contains(report.Err.Error(), "role") {
							t.Errorf("%s: reported %+v", key, report)
						}
						e.wantRows(key, 0, 0)
					}
				}
			})
		}
	})
}

// The inbox says the same.
func TestInboxHandlerThatLeavesTheInboxOutOfReach(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{MaxAttempts: 1, Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
		if err := effectOf(ctx, event.Key); err != nil {
			return err
		}
		return execute(ctx, consumer.Tx(ctx), "SET LOCAL search_path = pg_catalog; SET LOCAL ROLE pg_monitor")
	}})
	p.run()
	p.record("k")
	report := p.wantWorked("k", consumer.ResultCommitFailed)
	if !strings.Contains(report.Err.Error(), "role") {
		t.Errorf("reported %v", report.Err)
	}
	p.wantRows("k", 0, 1)
}

// Where something else runs in the place of COMMIT, no event counts as recorded.
func TestInboxWhoseCommitIsAName(t *testing.T) {
	t.Parallel()
	p := newInbox(t, inbox.Config{})
	for _, stands := range []string{"SELECT 1", "ROLLBACK", chain} {
		cfg, err := pgxpool.ParseConfig(withSetting(p.dsn, "pool_max_conns", "2"))
		if err != nil {
			t.Fatal(err)
		}
		cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Prepare(ctx, "commit", stands)
			return err
		}
		pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		p.openOn(pool, inbox.Config{})
		for range 2 {
			wantProblem(t, p.post("k", "{}"), 503, "database-unavailable")
			p.wantRows("k", 0, 0)
		}
	}
}
