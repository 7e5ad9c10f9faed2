package consumer_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// answers are those for which the memory of an event is closed in different ways.
var answers = map[string]http.HandlerFunc{
	"204":    func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) },
	"201":    func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) },
	"ignore": nil, // the event is ignored: see newAnswering
}

// newAnswering is NewEnv for a handler that ends with one of the answers.
func newAnswering(t testing.TB, f receivertest.Flavour, dsn string, answer http.HandlerFunc, handler func(answer http.HandlerFunc) func(e *receivertest.Env) http.HandlerFunc) (e *receivertest.Env) {
	t.Helper()
	if answer == nil {
		e = receivertest.NewHandlerEnvAt(t, f, dsn, consumer.Config{}, receivertest.Ignoring(handler(func(http.ResponseWriter, *http.Request) {})))
	} else {
		e = receivertest.NewEnvAt(t, f, dsn, consumer.Config{}, handler(answer))
	}
	e.MustExec(receivertest.Schema)
	return e
}

// sending is a handler that runs those of the request's Test-Statement headers after its effect.
func sending(answer http.HandlerFunc) func(e *receivertest.Env) http.HandlerFunc {
	return func(e *receivertest.Env) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			receivertest.Effect(e)(receivertest.DiscardWriter{}, r)
			for _, statement := range r.Header["Test-Statement"] {
				if err := e.Exec(r.Context(), statement); err != nil && !strings.Contains(err.Error(), "keeps its row") {
					e.T.Error(err)
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
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, answer := range answers {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := newAnswering(t, f, pgtest.New(t, migrations.Inbox), answer, sending)
				e.MustExec(`CREATE FUNCTION erase(key text) RETURNS void LANGUAGE sql AS 'DELETE FROM processed_events WHERE idempotency_key = key'`)
				for _, statement := range []string{
					"SELECT erase('k')",
					"UPDATE processed_events SET receiver = 'another' WHERE idempotency_key = 'k'",
					"DELETE FROM processed_events WHERE related_reference = 'customer 42'",
					"WITH gone AS (DELETE FROM public.\"processed_events\" RETURNING 1) SELECT count(*) FROM gone",
					"UPDATE Processed_Events SET idempotency_key = 'anonymous'",
					"TRUNCATE processed_events",
				} {
					for range 2 {
						// The handler minds no errors.
						receivertest.WantProblem(t, e.Do(e.NewRequest("k", "{}", running(statement))), 500, "commit-failed")
						report := e.WantResult(consumer.ResultCommitFailed)
						if report.Err == nil || !strings.Contains(report.Err.Error(), "a statement of the handler failed and the handler answered 2xx all the same") {
							t.Errorf("%s: reported %v", statement, report.Err)
						}
						e.WantRows("k", 0, 0)
					}
				}
				// What is personal in the row may go: it is the same row.
				got := e.Do(e.NewRequest("k", "{}", running("UPDATE processed_events SET related_reference = NULL WHERE related_reference = 'customer 42'")))
				if got.Status/100 != 2 || got.Header.Get(webhook.Replayed) != "" {
					t.Errorf("answered %d %s", got.Status, got.Body)
				}
				receivertest.WantReplayed(t, e.Post("k", "{}"), got.Status, "")
				e.WantRows("k", 1, 1)
				e.MustExec("DELETE FROM processed_events; TRUNCATE processed_events") // in another transaction than the event's
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
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		for name, answer := range answers {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				e := newAnswering(t, f, pgtest.New(t, migrations.Inbox), answer, sending)
				e.MustExec("CREATE SCHEMA tenant")
				for key, test := range cases {
					key = strings.ReplaceAll(key, " ", "-")
					for range 2 {
						got := e.Do(e.NewRequest(key, "{}", running(test.statements...)))
						report := <-e.Reports
						if test.problem == "" {
							if got.Status/100 != 2 {
								t.Errorf("%s: answered %d %s (%v)", key, got.Status, got.Body, report.Err)
							}
							e.WantRows(key, 1, 1)
							continue
						}
						receivertest.WantProblem(t, got, 500, test.problem)
						if report.Result != consumer.ResultCommitFailed || !strings.Contains(report.Err.Error(), "role") {
							t.Errorf("%s: reported %+v", key, report)
						}
						e.WantRows(key, 0, 0)
					}
				}
			})
		}
	})
}
