package consumer_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// newBatchEnv returns a receiver with one connection, whose handler runs the statements behind the
// effect of an event.
func newBatchEnv(t *testing.T, statements func(key string) []string, settings ...string) *receivertest.Env {
	t.Helper()
	dsn := receivertest.WithSetting(pgtest.New(t, migrations.Inbox), "pool_max_conns", "1")
	for setting := range slices.Chunk(settings, 2) { // a name and a value
		dsn = receivertest.WithSetting(dsn, setting[0], setting[1])
	}
	e := receivertest.NewHandlerEnvAt(t, receivertest.PGX(), dsn, unhurried(), func(e *receivertest.Env) receivertest.HandlerFunc {
		return func(ctx context.Context, event consumer.Event) error {
			if err := e.Exec(ctx, "INSERT INTO public.effect VALUES ($1)", event.IdempotencyKey); err != nil {
				return err
			}
			for _, statement := range statements(event.IdempotencyKey) {
				if err := e.Exec(ctx, statement); err != nil {
					return err
				}
			}
			return nil
		}
	})
	e.MustExec(receivertest.Schema)
	return e
}

// What an event has been answered 2xx for is there, also where the event behind it could not begin:
// a rollback to the savepoint before would undo what was remembered.
func TestBatchKeepsWhatItAnswers(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ mode, statement string }{
		"an admission that cannot be parsed": {"describe_exec", "SET search_path = pg_catalog"},
		"a statement that is no more": {"cache_statement", `DO $$ BEGIN
			EXECUTE (SELECT format('DEALLOCATE %I', name) FROM pg_prepared_statements WHERE statement LIKE 'RELEASE%'); END $$`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newBatchEnv(t, func(key string) []string {
				if key == "k1" {
					return []string{c.statement}
				}
				return nil
			}, "default_query_exec_mode", c.mode)
			e.Do(batchRequest(e, "a", "b", "c")) // whose statements are known to the connection from here on
			answer := e.Do(batchRequest(e, "k1", "k2", "k3"))
			for key, result := range webhook.ParseBatchResults([]byte(answer.Body)) {
				rows := 0
				if result.Status == http.StatusNoContent {
					rows = 1
				}
				e.WantRows(key, rows, rows)
			}
		})
	}
}

// A client that goes between two events of a batch undoes nothing of the one before: it has taken
// effect, and the others come again.
func TestBatchKeepsWhatIsDoneWhenTheClientGoes(t *testing.T) {
	t.Parallel()
	working := make(chan struct{})
	e := receivertest.NewHandlerEnv(t, receivertest.PGX(), unhurried(), func(*receivertest.Env) receivertest.HandlerFunc {
		return func(ctx context.Context, event consumer.Event) error {
			err := receivertest.EffectOf(ctx, event.IdempotencyKey)
			close(working)
			<-ctx.Done()
			return err
		}
	})
	ctx, hangUp := context.WithCancel(t.Context())
	sent := make(chan error, 1)
	go func() {
		_, err := e.Try(batchRequest(e, "k1", "k2", "k3").WithContext(ctx))
		sent <- err
	}()
	<-working
	hangUp()
	testkit.ErrorIs(t, "the client", <-sent, context.Canceled)
	e.WantResult(consumer.ResultProcessed)
	for range 2 {
		e.WantResult(consumer.ResultUnavailable)
	}
	e.WantRows("k1", 1, 1)
	e.WantRows("k2", 0, 0)
}

// No setting, role, temporary table or cursor of a handler reaches the next event of its batch, and
// none keeps it away: each event of the batch takes effect once, as if it had come alone.
func TestSecurityBatchLeavesNothingForTheNextEvent(t *testing.T) {
	t.Parallel()
	all := map[string][]string{
		"staging":   {"CREATE TEMP TABLE IF NOT EXISTS staging (key text) ON COMMIT DROP", "INSERT INTO staging VALUES ('%s')", "INSERT INTO public.staged SELECT key FROM staging"},
		"new table": {"CREATE TEMP TABLE new_table (key text) ON COMMIT DROP"},
		"cursor":    {"DECLARE c CURSOR FOR SELECT 1"},
		"path":      {"SET LOCAL search_path = tenant"},
		"local":     {"SET LOCAL ROLE pg_read_all_data"},
		"read only": {"SET TRANSACTION READ ONLY"},
	}
	maps.Copy(all, changes)
	delete(all, "exchange") // which ends the transaction
	delete(all, "default")  // which keeps the next transaction away, also from a single event
	e := newBatchEnv(t, func(key string) (statements []string) {
		name, _, _ := strings.Cut(key, ".")
		statements = []string{`INSERT INTO public.met SELECT '` + key + `', current_setting('search_path') || ' ' || current_user,
			(SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) FROM pg_settings WHERE source = 'session' AND name !~ '^transaction_')`}
		for _, statement := range all[name] {
			statements = append(statements, strings.ReplaceAll(statement, "%s", key))
		}
		return statements
	})
	e.MustExec(`CREATE TABLE met (key text, name text, session text); CREATE TABLE staged (key text);
		CREATE SCHEMA tenant; CREATE TABLE tenant.processed_events (LIKE public.processed_events INCLUDING ALL);
		GRANT ALL ON ALL TABLES IN SCHEMA public TO pg_read_all_data`) // a role that every server has
	for name := range all {
		one, two, three := name+".1", name+".2", name+".3"
		wantBatch(e, batchRequest(e, one, two, three), map[string]int{one: 204, two: 204, three: 204})
		for _, key := range []string{one, two, three} {
			e.WantRows(key, 1, 1)
		}
	}
	testkit.Equal(t, "events of the staging table", e.Count("SELECT count(*) FROM staged"), 3)
	var met string
	pgtest.Must(t, e.Pool.QueryRow(t.Context(), "SELECT string_agg(DISTINCT name || ': ' || session, E'\n') FROM met").Scan(&met))
	if strings.Contains(met, "\n") {
		t.Errorf("handlers met several sessions:\n%s", met)
	}
}

// A handler that commits by itself, and continues in another transaction, is found out in a batch
// as it is alone: what it did behind the commit is undone, so its event must not count as
// processed.
func TestBatchMarksAHandlerThatCommits(t *testing.T) {
	t.Parallel()
	for name, keys := range map[string][]string{"first": {"k", "b"}, "last": {"a", "k"}, "alone": {"k"}} {
		for _, status := range []int{http.StatusNoContent, http.StatusOK} {
			t.Run(fmt.Sprint(name, status), func(t *testing.T) {
				t.Parallel()
				e := receivertest.NewEnv(t, receivertest.PGX(), unhurried(), func(e *receivertest.Env) http.HandlerFunc {
					return func(w http.ResponseWriter, r *http.Request) {
						mustNot(e, receivertest.EffectOf(r.Context(), consumer.EventFrom(r.Context()).IdempotencyKey))
						if consumer.EventFrom(r.Context()).IdempotencyKey == "k" {
							mustNot(e, e.Exec(r.Context(), unseen+"COMMIT AND CHAIN"))
							mustNot(e, e.Exec(r.Context(), "INSERT INTO effect VALUES ('late')"))
						}
						w.WriteHeader(status)
					}
				})
				want := map[string]int{"a": 500, "k": 500, "b": status}
				again := map[string]int{"a": status, "k": 422, "b": status}
				for _, all := range []map[string]int{want, again} {
					maps.DeleteFunc(all, func(key string, _ int) bool { return !slices.Contains(keys, key) })
					wantBatch(e, batchRequest(e, keys...), all)
				}
				for _, key := range keys {
					e.WantRows(key, 1, 1)
				}
				e.WantRows("late", 0, 0)
			})
		}
	}
}

// A batch of which nothing is remembered commits what it has learned of a duplicate.
func TestBatchOfNothingNew(t *testing.T) {
	t.Parallel()
	e := receivertest.NewHandlerEnv(t, receivertest.PGX(), unhurried(), func(*receivertest.Env) receivertest.HandlerFunc {
		return func(_ context.Context, event consumer.Event) error {
			if event.IdempotencyKey == "failing" {
				return receivertest.ErrHandler
			}
			return nil
		}
	})
	wantBatch(e, batchRequest(e, "known"), map[string]int{"known": 204})
	wantBatch(e, batchRequest(e, "known", "failing"), map[string]int{"known": 204, "failing": 500})
	wantBatch(e, batchRequest(e, "failing"), map[string]int{"failing": 500})
}
