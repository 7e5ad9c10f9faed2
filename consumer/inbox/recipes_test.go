package inbox_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// recipes returns the statements for support that docs/receiving.md shows, by the first sentence of
// their comment.
func recipes(t *testing.T) map[string]string {
	t.Helper()
	document, err := os.ReadFile("../../docs/receiving.md")
	pgtest.Must(t, err)
	_, section, ok := strings.Cut(string(document), "## SQL for support\n")
	if !ok {
		t.Fatal("docs/receiving.md has no section of SQL for support")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	found := map[string]string{}
	for _, part := range strings.Split(section, "```sql\n")[1:] {
		block, _, _ := strings.Cut(part, "```")
		comment, _, _ := strings.Cut(block, "\n")
		title := strings.TrimPrefix(comment, "-- ")
		title = title[:strings.IndexAny(title, ".?:")]
		found[title] = block
	}
	return found
}

// sample fills the inbox of an env with an event in every state, by hand, so that a recipe is
// judged by what is in the table and not by the code that usually writes it. Those of ordering key
// c-1 wait behind one that failed.
const sample = `
CREATE TABLE sample AS SELECT * FROM (VALUES
    ('by-middleware', 'invoice.paid', 'INV-1', 'succeeded', 1, NULL::interval, interval '-1 h', NULL, NULL, 0, NULL::bigint, NULL, timestamptz '2026-01-03'),
    ('ignored-by-middleware', 'invoice.paid', NULL, 'ignored', 1, NULL, interval '-1 h', 'of no concern', NULL, 0, NULL, NULL, '2026-01-03'),
    ('done', 'invoice.paid', 'INV-1', 'succeeded', 1, NULL, interval '-1 h', NULL, NULL, 0, 1, NULL, '2026-01-03'),
    ('due', 'invoice.paid', 'INV-2', 'pending', 0, interval '-1 min', NULL, NULL, NULL, 0, 2, NULL, '2026-01-03'),
    ('retried', 'invoice.paid', 'INV-3', 'pending', 2, interval '5 min', NULL, 'no such customer', NULL, 0, 3, NULL, '2026-01-03'),
    ('worked', 'invoice.sent', NULL, 'processing', 0, interval '-1 s', NULL, NULL, NULL, 0, 4, 'worker-7', '2026-01-03'),
    ('failed-old', 'invoice.paid', NULL, 'failed', 8, NULL, interval '-1 d', 'no such customer', NULL, 0, 5, NULL, '2026-01-01'),
    ('failed', 'invoice.paid', NULL, 'failed', 8, NULL, interval '-1 h', 'no such customer', NULL, 0, 6, NULL, '2026-01-03'),
    ('unknown', 'invoice.lost', NULL, 'ignored', 1, NULL, interval '-1 h', 'no handler for invoice.lost version 1', NULL, 0, 7, NULL, '2026-01-03'),
    ('head', 'invoice.paid', NULL, 'failed', 8, NULL, interval '-1 h', 'account closed', 'c-1', 10, 8, NULL, '2026-01-03'),
    ('second', 'invoice.paid', NULL, 'pending', 0, NULL, NULL, NULL, 'c-1', 11, 9, NULL, '2026-01-03'),
    ('third', 'invoice.paid', NULL, 'pending', 0, NULL, NULL, NULL, 'c-1', 12, 10, NULL, '2026-01-03')
) AS s (key, type, reference, state, attempts, due, processed, error, ordering, sequence, id, worker, received);
INSERT INTO processed_events (receiver, source, idempotency_key, event_type, related_reference, processing_state, attempts, processed_at, last_error, received_at)
SELECT 'test', 'finance', key, type, reference, state, attempts, now() + processed, error, received FROM sample WHERE id IS NULL
UNION ALL SELECT 'test', 'finance', key, type, reference, 'recorded', 0, NULL, NULL, received FROM sample WHERE id IS NOT NULL
UNION ALL SELECT 'test', 'finance', 'removed', 'invoice.paid', NULL, 'recorded', 0, NULL, NULL, '2026-01-03';
INSERT INTO inbox_events (receiver, source, idempotency_key, event_type, related_reference, processing_state, attempts, next_attempt_at,
    processed_at, last_error, ordering_key, sequence, inbox_id, payload, claimed_by, claimed_at, received_at)
SELECT 'test', 'finance', key, type, reference, state, attempts, now() + due, now() + processed, error, ordering, sequence, id,
    '{}', worker, CASE WHEN worker IS NOT NULL THEN now() - interval '5 s' END, received
FROM sample WHERE id IS NOT NULL;
INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at) VALUES ('test', 'finance', '2026-01-01 00:00:00Z', now())`

// beforeReplay stands in a recipe for the time at which a replay begins.
const beforeReplay = "2026-01-05 12:00:00Z"

// filled replaces what stands in capitals, and times.
func filled(recipe string, values map[string]string) string {
	pairs := []string{"'RECEIVER'", "'test'", "'SOURCE'", "'finance'"}
	for name, value := range values {
		pairs = append(pairs, "'"+name, "'"+value, name+":", value+":", name+"'", value+"'")
	}
	return strings.NewReplacer(pairs...).Replace(recipe)
}

// rows runs a statement and returns what it answers, a line for each row, its columns divided by
// bars.
func tableRows(e *receivertest.Env, query string) (lines []string) {
	e.T.Helper()
	// A person's psql sends it as a text, too.
	rows, err := e.Pool.Query(e.T.Context(), query, pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		e.T.Fatalf("%v\n%s", err, query)
	}
	defer rows.Close()
	for rows.Next() {
		lines = append(lines, string(bytes.Join(rows.RawValues(), []byte("|")))) // texts, in this mode
	}
	if err := rows.Err(); err != nil {
		e.T.Fatalf("%v\n%s", err, query)
	}
	return lines
}

// states are the events by key, with what a worker would see of them.
func states(e *receivertest.Env) string {
	return strings.Join(tableRows(e, `SELECT idempotency_key || ' ' || coalesce(e.processing_state, p.processing_state) || ' ' || coalesce(e.attempts, p.attempts) || CASE
		WHEN e.next_attempt_at <= now() THEN ' due' WHEN e.next_attempt_at > now() THEN ' later' ELSE '' END
		FROM processed_events p FULL JOIN inbox_events e USING (source, idempotency_key) ORDER BY e.inbox_id NULLS FIRST`), "\n")
}

func newSample(t *testing.T) *receivertest.Env {
	t.Helper()
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{Receiver: "test", Source: "finance"}, receivertest.Effect)
	e.MustExec(sample)
	return e
}

// A recipe is a statement of the document, tried with values on the sample. check gets what it
// answered; changes is what has become different of the states.
type recipeCase struct {
	title   string
	values  map[string]string
	rows    int      // how many it answers
	has     []string // what stands in them
	changes []string
}

var recipeCases = []recipeCase{
	{title: "Find an event by its key", values: map[string]string{"KEY": "retried"}, rows: 1, has: []string{"INV-3|", "|pending|2|", "no such customer"}},
	{title: "Find an event by its key", values: map[string]string{"KEY": "ignored-by-middleware"}, rows: 1, has: []string{"|ignored|1|", "of no concern"}},
	{title: "Find an event by its key", values: map[string]string{"KEY": "removed"}, rows: 1, has: []string{"|recorded|0|"}},
	{title: "Find an event by its key", values: map[string]string{"KEY": "unheard of"}, rows: 0},
	{title: "Find events by the producer's reference", values: map[string]string{"REFERENCE": "INV-1"}, rows: 2, has: []string{"finance|by-middleware", "finance|done"}},

	{title: "Why has this event not been processed", values: map[string]string{"KEY": "done"}, rows: 1, has: []string{"it has been, at "}},
	{title: "Why has this event not been processed", values: map[string]string{"KEY": "by-middleware"}, rows: 1, has: []string{"it has been, at "}},
	{title: "Why has this event not been processed", values: map[string]string{"KEY": "ignored-by-middleware"}, rows: 1, has: []string{"ignored: of no concern"}},
	{title: "Why has this event not been processed", values: map[string]string{"KEY": "removed"}, rows: 1, has: []string{"was removed from the inbox since"}},
	{title: "Why has this event not been processed", values: map[string]string{"KEY": "unknown"}, rows: 1, has: []string{"ignored: no handler for invoice.lost version 1"}},
	{title: "Why has this event not been processed", values: map[string]string{"KEY": "failed"}, rows: 1, has: []string{"failed for good, attempt 8: no such customer"}},
	{title: "Why has this event not been processed", values: map[string]string{"KEY": "worked"}, rows: 1, has: []string{"being worked by worker-7 since "}},
	{title: "Why has this event not been processed", values: map[string]string{"KEY": "third"}, rows: 1, has: []string{"comes before it: head (failed)"}},
	{title: "Why has this event not been processed", values: map[string]string{"KEY": "retried"}, rows: 1, has: []string{"attempt 3 comes at ", "; before: no such customer"}},
	{title: "Why has this event not been processed", values: map[string]string{"KEY": "due"}, rows: 1, has: []string{"due since "}},

	{title: "From when on is everything remembered", rows: 1, has: []string{"finance|2026-01-01"}},
	{title: "What waits, and how far behind are we", rows: 2, has: []string{"invoice.paid|1|00:01:00", "|1|0\n", "invoice.paid|0||0|2"}},
	{title: "What is being worked at this moment", rows: 1, has: []string{"worked|invoice.sent|1|worker-7|00:00:05"}},
	{title: "What has failed, or was ignored, and why", rows: 3, has: []string{
		"failed|invoice.paid|no such customer|2|5|6|", "failed|invoice.paid|account closed|1|8|8|", "ignored|invoice.lost|no handler",
	}},
	{title: "Which ordering keys wait behind an event that has failed", rows: 1, has: []string{"c-1|head|account closed|", "|2"}},

	{title: "Replay one event that failed or was ignored", values: map[string]string{"KEY": "failed"}, changes: []string{"failed pending 0 due"}},
	{title: "Replay one event that failed or was ignored", values: map[string]string{"KEY": "unknown"}, changes: []string{"unknown pending 0 due"}},
	{title: "Replay one event that failed or was ignored", values: map[string]string{"KEY": "head"}, changes: []string{"head pending 0"}},
	{title: "Replay one event that failed or was ignored", values: map[string]string{"KEY": "done"}},
	{title: "Replay one event that failed or was ignored", values: map[string]string{"KEY": "worked"}},
	{title: "Replay one event that failed or was ignored", values: map[string]string{"KEY": "ignored-by-middleware"}},
	{title: "Replay many", values: map[string]string{"TYPE": "invoice.paid", beforeReplay: "now"}, changes: []string{"failed pending 0 due", "head pending 0"}},
	{title: "Ignore one event that waits or has failed", values: map[string]string{"KEY": "head", "NAME": "Ada", "REASON": "refunded"}, changes: []string{"head ignored 8"}},
	{title: "Ignore one event that waits or has failed", values: map[string]string{"KEY": "retried", "NAME": "Ada", "REASON": "refunded"}, changes: []string{"retried ignored 2"}},
	{title: "Ignore one event that waits or has failed", values: map[string]string{"KEY": "worked", "NAME": "Ada", "REASON": "refunded"}},

	{title: "Remove an event that is done from the inbox, such as for what is personal in it", values: map[string]string{"KEY": "done"}, changes: []string{"done recorded 0"}},
	{title: "Remove an event that is done from the inbox, such as for what is personal in it", values: map[string]string{"KEY": "due"}},
	{title: "Remove an event that is done from the inbox, such as for what is personal in it", values: map[string]string{"KEY": "by-middleware"}},

	{title: "How large are the tables, and does vacuum keep up", rows: 2, has: []string{"processed_events|", "inbox_events|", "kB|"}},
}

func TestRecipes(t *testing.T) {
	t.Parallel()
	all := recipes(t)
	for _, c := range recipeCases {
		t.Run(c.title, func(t *testing.T) {
			testsize.OneIn(t, 3)
			t.Parallel()
			if all[c.title] == "" {
				t.Fatalf("docs/receiving.md has no statement of this title, but %q", slices.Sorted(maps.Keys(all)))
			}
			e := newSample(t)
			before := states(e)
			answered := tableRows(e, filled(all[c.title], c.values))
			text := strings.Join(answered, "\n") + "\n"
			if len(answered) != c.rows {
				t.Errorf("%d rows, want %d:\n%s", len(answered), c.rows, text)
			}
			for _, want := range c.has {
				if !strings.Contains(text, want) {
					t.Errorf("%q is not in\n%s", want, text)
				}
			}
			var changes []string
			for line := range strings.Lines(states(e) + "\n") {
				if !strings.Contains(before+"\n", line) {
					changes = append(changes, strings.TrimSpace(line))
				}
			}
			if !slices.Equal(changes, c.changes) {
				t.Errorf("changed %q, want %q", changes, c.changes)
			}
		})
	}
}

// The recipes that are tried by TestRecipesAboutSessions.
const (
	keyHolder   = "Which session is processing this key in this moment, so that others are answered 409"
	tableHolder = "Who has had a transaction open on one of the tables, for how long, and whom does it keep waiting"
)

// Each statement of the document is tried by this file, the ones about sessions below.
func TestEveryRecipeIsTried(t *testing.T) {
	t.Parallel()
	tried := []string{keyHolder, tableHolder}
	for _, c := range recipeCases {
		tried = append(tried, c.title)
	}
	for title := range recipes(t) {
		if !slices.Contains(tried, title) {
			t.Errorf("%q: no test tries it", title)
		}
	}
}

func TestRecipesAboutSessions(t *testing.T) {
	t.Parallel()
	all := recipes(t)
	inside, release := make(chan int), make(chan struct{})
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{Receiver: "test", Source: "finance"}, func(*receivertest.Env) http.HandlerFunc {
		return func(_ http.ResponseWriter, r *http.Request) {
			var pid int
			if err := consumer.Tx(r.Context()).QueryRow(r.Context(), "SELECT pg_backend_pid()").Scan(&pid); err != nil {
				t.Error(err)
			}
			inside <- pid
			<-release
		}
	})
	answered := make(chan receivertest.Response)
	go func() {
		answer, err := e.Try(e.NewRequest("k", "{}"))
		if err != nil {
			t.Error(err)
		}
		answered <- answer
	}()
	pid := <-inside
	key := filled(all[keyHolder], map[string]string{"KEY": "k"})
	if got := tableRows(e, key); len(got) != 1 || !strings.HasPrefix(got[0], fmt.Sprint(pid, "|")) {
		t.Errorf("the session that processes k is %q, want pid %d", got, pid)
	}
	other := filled(all[keyHolder], map[string]string{"KEY": "other"})
	if got := tableRows(e, other); len(got) != 0 {
		t.Errorf("%q processes a key that is never sent", got)
	}

	// A Once of another process waits for the request's row.
	waiter := make(chan struct{})
	go func() {
		defer close(waiter)
		if _, err := e.Once(t.Context(), e, "finance", "k", func() {}); err != nil {
			t.Error(err)
		}
	}()
	e.Await(`SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid)))`, pid)
	open := tableRows(e, filled(all[tableHolder], nil))
	if len(open) != 2 || !strings.HasPrefix(open[0], fmt.Sprint(pid, "|")) || strings.HasSuffix(open[0], "|") || !strings.HasSuffix(open[1], "|") {
		t.Errorf("sessions with a transaction open: %q; want that of pid %d first, keeping the other waiting", open, pid)
	}
	close(release)
	if got := <-answered; got.Status != http.StatusOK {
		t.Errorf("answered %d", got.Status)
	}
	<-waiter
}

// However many times it is repeated, what fails again is replayed once.
func TestReplayManyComesToAnEnd(t *testing.T) {
	t.Parallel()
	replay := recipes(t)["Replay many"]
	e := newSample(t)
	start := tableRows(e, "SELECT now()")[0]
	for _, want := range []int64{2, 0} {
		tag, err := e.Pool.Exec(t.Context(), filled(replay, map[string]string{"TYPE": "invoice.paid", beforeReplay: start}))
		pgtest.Must(t, err)
		if tag.RowsAffected() != want {
			t.Errorf("%s, want %d", tag, want)
		}
		e.MustExec(`UPDATE inbox_events SET processing_state = 'failed', processed_at = now(), next_attempt_at = NULL WHERE idempotency_key IN ('failed', 'head')`)
	}
}

// A reader needs the rights that the document names, and no more.
func TestRecipesWithTheRightsOfAReader(t *testing.T) {
	t.Parallel()
	all := recipes(t)
	e := newSample(t)
	e.MustExec(`CREATE ROLE recipe_reader; GRANT SELECT ON processed_events, inbox_events, inbox_forgotten TO recipe_reader`)
	t.Cleanup(func() {
		_, _ = e.Pool.Exec(context.Background(), `DROP OWNED BY recipe_reader; DROP ROLE recipe_reader`)
	})
	reader := *e
	reader.Pool = pgtest.Pool(t, receivertest.WithSetting(e.DSN, "role", "recipe_reader"))
	for _, c := range recipeCases {
		if strings.Contains(all[c.title], "SELECT") && !strings.Contains(all[c.title], "UPDATE") && !strings.Contains(all[c.title], "DELETE") {
			tableRows(&reader, filled(all[c.title], c.values))
		}
	}
	release := e.Hold(func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `SELECT pg_advisory_xact_lock(hashtextextended(E'test\nfinance\nk', 122550254464888 # 'processed_events'::regclass::oid::bigint)), count(*) FROM processed_events`)
		return err
	})
	for _, granted := range []bool{false, true} {
		if granted {
			e.MustExec(`GRANT pg_read_all_stats TO recipe_reader`)
		}
		for _, title := range []string{keyHolder, tableHolder} {
			got := tableRows(&reader, filled(all[title], map[string]string{"KEY": "k"}))
			if len(got) != 1 || strings.Contains(got[0], "<insufficient privilege>") == granted {
				t.Errorf("granted pg_read_all_stats: %v, %s: %q", granted, title, got)
			}
		}
	}
	release()
}

// What an operator has changed by SQL, workers take up: also the ordering key behind it.
func TestWorkersFollowRecipes(t *testing.T) {
	t.Parallel()
	all := recipes(t)
	for title, c := range map[string]struct {
		values map[string]string
		worked []string // in this order
	}{
		"Replay one event that failed or was ignored": {map[string]string{"KEY": "head"}, []string{"head", "second", "third"}},
		"Replay many": {map[string]string{"TYPE": "invoice.created", beforeReplay: "now"}, []string{"head", "second", "third"}},
		"Ignore one event that waits or has failed": {map[string]string{"KEY": "head", "NAME": "Ada", "REASON": "refunded"}, []string{"second", "third"}},
	} {
		t.Run(title, func(t *testing.T) {
			t.Parallel()
			var mended atomic.Bool
			p := newInbox(t, inbox.Config{
				Config: consumer.Config{Receiver: "test", Source: "finance"},
				Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
					if event.IdempotencyKey == "head" && !mended.Load() {
						return consumer.Permanent(receivertest.ErrHandler)
					}
					return receivertest.EffectOf(ctx, event.IdempotencyKey)
				},
			})
			for i, key := range []string{"head", "second", "third"} {
				p.record(key, ordered("c-1", i+1))
			}
			p.run()
			p.wantWorked("head", consumer.ResultFailed)
			pgtest.Must(t, p.stop())
			mended.Store(true)
			tableRows(p.Env, filled(all[title], c.values))
			p.run() // which looks at once for what was changed by hand, and then every half minute
			for _, key := range c.worked {
				p.wantWorked(key, consumer.ResultProcessed)
			}
		})
	}
}
