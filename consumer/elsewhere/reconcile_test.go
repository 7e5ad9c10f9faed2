package elsewhere

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/reconcile"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// questions are the cases of `outbox-relay reconcile`. The receiver in Go is tried by them, too.
var questions = []testCase{
	{"reconciled", reconciled},
	{"answers as in Go", answersAsInGo},
	{"hostile questions", hostileQuestions},
	{"one question at a time", oneQuestionAtATime},
	{"question without database", questionWithoutDatabase},
}

// effects is the query of receivers for the keys of effects: in these tests an invoice has the key
// of its event. It has a %, which psycopg reads as a placeholder.
const effects = `SELECT key FROM effect_keys() AS key WHERE key LIKE '%'`

// effectsSchema makes what effects reads. It waits for the lock of hold, as long as that takes.
const effectsSchema = `
CREATE FUNCTION effect_keys() RETURNS SETOF text LANGUAGE plpgsql SET lock_timeout = 0 AS $$
BEGIN
	PERFORM pg_advisory_xact_lock_shared(4711);
	RETURN QUERY SELECT invoice FROM shipments;
END $$;`

// goReceiver is a receiver of package consumer that has the handler of the others.
func goReceiver(t *testing.T, dsn string) (url string) {
	t.Helper()
	cfg := consumer.Config{Receiver: "shipping", Source: "finance", Secrets: []string{oldSecret, secret}}
	pool := pgtest.Pool(t, dsn)
	mux := http.NewServeMux()
	mux.Handle("POST /webhooks/finance", receivertest.Must(consumer.New(pool, cfg, func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		_, err := tx.Exec(ctx, "INSERT INTO shipments SELECT invoice, total FROM json_to_record($1) AS p (invoice text, total numeric)", string(event.Payload))
		return err
	})))
	mux.Handle("/webhooks/finance/reconcile", receivertest.Must(consumer.Reconcile(pool, consumer.ReconcileConfig{Config: cfg, Effects: effects})))
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL + "/webhooks/finance"
}

// forget empties the receiver's tables.
func (r *receiver) forget(t *testing.T) {
	t.Helper()
	r.exec(t, "TRUNCATE processed_events, inbox_events, inbox_forgotten, shipments")
}

// reconciled lets a relay deliver events, plants what reconcile must find, and runs the command.
func reconciled(t *testing.T, r *receiver) {
	r.forget(t)
	name := r.name + "_outbox"
	pgtest.Must(t, r.server.CreateDatabase(t.Context(), name, ""))
	dsn := r.server.DSN(name)
	pgtest.Migrate(t, dsn, migrations.Outbox)
	outbox := pgtest.Pool(t, dsn)
	env := append(os.Environ(), "OUTBOX_DATABASE_URL="+dsn, "OUTBOX_DESTINATION_URL="+r.url, "OUTBOX_SIGNING_SECRET="+secret,
		"OUTBOX_METRICS_LISTEN=none", "OUTBOX_ADMIN_LISTEN=none", "OUTBOX_DATABASE_ALLOW_SUPERUSER=true")
	pgtest.Exec(t, outbox, `INSERT INTO outbox (event_type, payload, idempotency_key)
		SELECT 'invoice.created', json_build_object('invoice', 'k' || i, 'total', '1.00'), 'k' || i FROM generate_series(1, 50) i`)
	relay := exec.Command(*relayProgram, "run")
	relay.Env = env
	pgtest.Must(t, relay.Start())
	for delivered := 0; delivered < 50; {
		delivered = pgtest.Row[int](t, outbox, "SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered'")
	}
	pgtest.Must(t, relay.Process.Signal(os.Interrupt))
	_ = relay.Wait()

	command := func() (report map[string]json.RawMessage, code int) {
		t.Helper()
		c := exec.CommandContext(t.Context(), *relayProgram, "reconcile", "--url="+r.url+"/reconcile", "--settle=1ms", "--json")
		var said strings.Builder
		c.Env, c.Stderr = env, &said
		text, err := c.Output()
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if json.Unmarshal(text, &report) != nil {
			t.Fatalf("%s%s", text, &said)
		}
		return report, c.ProcessState.ExitCode()
	}
	want := func(report map[string]json.RawMessage, kind string, keys ...string) {
		t.Helper()
		var found []struct{ Key string }
		pgtest.Must(t, json.Unmarshal(report[kind], &found))
		var got []string
		for _, f := range found {
			got = append(got, f.Key)
		}
		if slices.Sort(got); !slices.Equal(got, keys) {
			t.Errorf("%s: %q, want %q", kind, got, keys)
		}
	}
	if report, code := command(); code != 0 || string(report["sent"]) != "50" || string(report["received"]) != "50" || string(report["counts_effects"]) != "true" {
		t.Errorf("exit %d, %s", code, report)
	}
	r.exec(t, `DELETE FROM processed_events WHERE idempotency_key IN ('k3', 'k30')`)
	r.exec(t, `DELETE FROM shipments WHERE invoice IN ('k3', 'k30', 'k7')`)
	r.exec(t, `INSERT INTO shipments VALUES ('k5', 1), ('k6', 1), ('k6', 1)`)
	r.exec(t, `INSERT INTO processed_events (receiver, source, idempotency_key, processing_state)
		SELECT 'shipping', 'finance', unnest(ARRAY['stranger "1"', 'strängér']), 'ignored'`)
	r.exec(t, `UPDATE processed_events SET processing_state = 'recorded' WHERE idempotency_key = 'k9'`)
	r.exec(t, `INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state, inbox_id) VALUES ('shipping', 'finance', 'k9', 'failed', 1)`)
	report, code := command()
	if code != 6 || string(report["complete"]) != "true" {
		t.Errorf("exit %d, %s", code, report)
	}
	want(report, "never_arrived", "k3", "k30")
	want(report, "effect_without_event", `stranger "1"`, "strängér")
	want(report, "effect_twice", "k5", "k6")
	want(report, "processed_no_effect", "k7")
	want(report, "no_effect", "k9")
}

// answersAsInGo asks the receiver and package reconcile the same, on one table.
func answersAsInGo(t *testing.T, r *receiver) {
	r.forget(t)
	r.exec(t, `INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at, event_id)
		SELECT receiver, source, k || i, state, now() - interval '1 hour' + i * interval '1 s', i
		FROM (VALUES ('shipping', 'finance', 'k', 'succeeded'), ('shipping', 'finance', 'ä', 'ignored'), ('shipping', 'finance', 'in', 'recorded'),
			('shipping', 'finance', U&'\FFFD', 'succeeded'), ('shipping', 'finance', U&'\+01F600', 'failed'),
			('shipping', 'other', 'o', 'succeeded'), ('billing', 'finance', 'b', 'failed')) v (receiver, source, k, state), generate_series(1, 300) i`)
	r.exec(t, `INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state, inbox_id, received_at)
		SELECT receiver, source, idempotency_key, (ARRAY['pending', 'processing', 'failed', 'succeeded', 'ignored'])[event_id % 5 + 1], event_id, received_at
		FROM processed_events WHERE processing_state = 'recorded' AND event_id > 100`)
	r.exec(t, `INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at) VALUES ('shipping', 'finance', '2026-01-02 03:04:05.678 UTC', now())`)
	r.exec(t, `INSERT INTO shipments SELECT idempotency_key, 1 FROM processed_events, generate_series(1, 2) n
		WHERE event_id % 10 = 0 OR n = 1 AND event_id % 7 > 0`)
	read := func(ctx context.Context, f func(pgx.Tx) error) error {
		return pgx.BeginTxFunc(ctx, r.pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, f)
	}
	reference := &reconcile.Receiver{Receiver: "shipping", Source: "finance", Effects: effects, Read: read, ReadEffects: read}
	now := pgtest.Row[time.Time](t, r.pool, "SELECT now()")
	since, until := now.Add(-59*time.Minute), now.Add(-57*time.Minute)
	salt := reconcile.NewSalt()
	for i, q := range []reconcile.Request{
		{Ask: reconcile.AskDescribe},
		{Ask: reconcile.AskDigest, Salt: salt},
		{Ask: reconcile.AskDigest, Salt: salt, Bounds: []string{"", "A", "in100", "k", "k1", "k150", "k300", "l", "ä2", "\uFFFD15", "\U0001F60015"}},
		{Ask: reconcile.AskDigest, Salt: salt, Bounds: []string{"k2"}, Since: since, Until: until},
		{Ask: reconcile.AskDigest, Salt: salt, Page: 1 << 40},
		{Ask: reconcile.AskList, Limit: 1000},
		{Ask: reconcile.AskList, After: "k200", Limit: 150},
		{Ask: reconcile.AskFind, Keys: []string{"k1", "in1", "in101", "in102", "in103", "in104", "in105", "ä1", "o1", "b1", `"`}},
		{Ask: reconcile.AskFind},
		{Ask: reconcile.AskUnfinished, Limit: 1000},
		{Ask: reconcile.AskUnfinished, Since: since, Until: until, Limit: 1000},
		{Ask: reconcile.AskUnfinished, Until: until, Limit: 7},
		{Ask: reconcile.AskDoubled, Limit: 1000},
		{Ask: reconcile.AskDoubled, Limit: 5},
		{Ask: reconcile.AskDoubled, Since: since, Until: until, Limit: 1000},
		{Ask: reconcile.AskDoubled, Keys: []string{"k10", "k11", "k20", "b10"}, Limit: 4},
		{Ask: reconcile.AskMissing, Limit: 1000},
		{Ask: reconcile.AskMissing, Since: since, Until: until, Limit: 1000},
		{Ask: reconcile.AskMissing, Keys: []string{"k7", "k8", "k14"}, Limit: 3},
	} {
		want, err := reference.Answer(t.Context(), q)
		pgtest.Must(t, err)
		body, err := q.Encode()
		pgtest.Must(t, err)
		answered := r.ask(t, fmt.Sprint("as in Go ", i), string(body), signing{})
		var got reconcile.Answer
		if err := json.Unmarshal([]byte(answered.text), &got); answered.status != http.StatusOK || err != nil {
			t.Fatalf("%+v: %v %+v", q, err, answered)
		}
		if !want.Now.IsZero() && got.Now.Sub(want.Now).Abs() < time.Hour {
			got.Now, want.Now = time.Time{}, time.Time{}
		}
		if got, want := normal(got), normal(want); !reflect.DeepEqual(got, want) {
			t.Errorf("%+v:\ngot  %+v\nwant %+v", q, got, want)
		}
	}
}

// normal returns the answer with its times in UTC, a digest's rows and ranges in order, and no rows
// as an empty list.
func normal(a reconcile.Answer) reconcile.Answer {
	a.RemembersSince, a.Held = a.RemembersSince.UTC(), append([]reconcile.Held{}, a.Held...)
	for i := range a.Held {
		a.Held[i].ReceivedAt = a.Held[i].ReceivedAt.UTC()
	}
	if a.Pages > 0 {
		slices.SortFunc(a.Held, func(a, b reconcile.Held) int { return strings.Compare(a.Key, b.Key) })
	}
	slices.SortFunc(a.Ranges, func(a, b reconcile.Range) int { return a.Number - b.Number })
	return a
}

// ask sends a question to the receiver. s changes it, as it changes a delivery.
func (r *receiver) ask(t *testing.T, key, body string, s signing) answer {
	t.Helper()
	got, err := r.do(r.question(t, key, body, s))
	pgtest.Must(t, err)
	return got
}

func (r *receiver) question(t *testing.T, key, body string, s signing) *http.Request {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/reconcile", strings.NewReader(body))
	pgtest.Must(t, err)
	request.Header = http.Header{"Content-Type": {"application/json"}, webhook.IdempotencyKey: {key}, webhook.Reconcile: {"logistics-1"}}
	if s.at.IsZero() {
		s.at = time.Now()
	}
	if s.secret == "" {
		s.secret = secret
	}
	parsed, err := webhook.ParseSecret(s.secret)
	pgtest.Must(t, err)
	if !s.underived {
		parsed = parsed.For(webhook.ReconcilePurpose)
	}
	webhook.Sign(request.Header, []byte(body), s.at, parsed)
	if s.tamper != nil {
		s.tamper(request.Header)
	}
	return request
}

func hostileQuestions(t *testing.T, r *receiver) {
	r.forget(t)
	const describe = `{"ask":"describe"}`
	digest := func(more string) string {
		return `{"ask":"digest","salt":"MDEyMzQ1Njc4OWFiY2RlZg=="` + more + `}`
	}
	many := func(n int, format string) string {
		var keys []string
		for i := range n {
			keys = append(keys, fmt.Sprintf(format, i))
		}
		text, _ := json.Marshal(keys)
		return string(text)
	}
	before := time.Now().Add(-6 * time.Minute)
	for name, c := range map[string]struct {
		body string
		signing
		status  int
		problem string
	}{
		"another secret":        {describe, signing{secret: otherSecret}, 401, "signature-invalid"},
		"the deliveries' own":   {describe, signing{underived: true}, 401, "signature-invalid"},
		"unsigned":              {describe, signing{tamper: func(h http.Header) { delete(h, webhook.Signature) }}, 401, "signature-invalid"},
		"the weaker signature":  {describe, signing{tamper: func(h http.Header) { h[webhook.Signature] = strings.Fields(h.Get(webhook.Signature))[:1] }}, 401, "signature-invalid"},
		"a changed key":         {describe, signing{tamper: set(webhook.IdempotencyKey, "another")}, 401, "signature-invalid"},
		"a changed destination": {describe, signing{tamper: set(webhook.Reconcile, "another")}, 401, "signature-invalid"},
		"from long ago":         {describe, signing{at: before}, 401, "timestamp-out-of-tolerance"},
		"from the future":       {describe, signing{at: time.Now().Add(6 * time.Minute)}, 401, "timestamp-out-of-tolerance"},
		"too large":             {describe + strings.Repeat(" ", 1<<20), signing{}, 413, "body-too-large"},
		"nothing":               {"", signing{}, 400, "question-invalid"},
		"no JSON":               {"ask", signing{}, 400, "question-invalid"},
		"a list":                {"[]", signing{}, 400, "question-invalid"},
		"null":                  {"null", signing{}, 400, "question-invalid"},
		"nothing asked":         {"{}", signing{}, 400, "question-invalid"},
		"a NUL":                 {"{\x00}", signing{}, 400, "question-invalid"},
		"something else":        {`{"ask":"payloads"}`, signing{}, 400, "question-invalid"},
		"a property":            {`{"ask":"constructor"}`, signing{}, 400, "question-invalid"},
		"an unknown field":      {`{"ask":"describe","receiver":"other"}`, signing{}, 400, "question-invalid"},
		"of another type":       {`{"ask":"list","limit":"many"}`, signing{}, 400, "question-invalid"},
		"a time that is none":   {digest(`,"since":"soon"`), signing{}, 400, "question-invalid"},
		"no salt":               {`{"ask":"digest"}`, signing{}, 400, "question-invalid"},
		"a short salt":          {`{"ask":"digest","salt":"MDEyMzQ1Njc4OWFiY2Rl"}`, signing{}, 400, "question-invalid"},
		"a salt that is none":   {`{"ask":"digest","salt":"!"}`, signing{}, 400, "question-invalid"},
		"bounds out of order":   {digest(`,"bounds":["b","a"]`), signing{}, 400, "question-invalid"},
		"in order elsewhere":    {digest(`,"bounds":["a","B"]`), signing{}, 400, "question-invalid"},
		"a bound twice":         {digest(`,"bounds":["a","a"]`), signing{}, 400, "question-invalid"},
		"too many ranges":       {digest(`,"bounds":` + many(reconcile.MaxBounds+1, "%06d")), signing{}, 400, "question-invalid"},
		"too long bounds":       {digest(`,"bounds":` + many(500, "%0999d")), signing{}, 400, "question-invalid"},
		"a negative page":       {digest(`,"page":-1`), signing{}, 400, "question-invalid"},
		"a page beyond numbers": {digest(`,"page":9223372036854775808`), signing{}, 400, "question-invalid"},
		"no limit":              {`{"ask":"list"}`, signing{}, 400, "question-invalid"},
		"a huge list":           {`{"ask":"list","limit":1001}`, signing{}, 400, "question-invalid"},
		"doubled below 1":       {`{"ask":"doubled","limit":-1}`, signing{}, 400, "question-invalid"},
		"missing without limit": {`{"ask":"missing"}`, signing{}, 400, "question-invalid"},
		"too many keys":         {`{"ask":"find","keys":` + many(1001, "%d") + `}`, signing{}, 400, "question-invalid"},
		"a huge key":            {`{"ask":"find","keys":["` + strings.Repeat("k", 1025) + `"]}`, signing{}, 400, "question-invalid"},
		"a huge position":       {`{"ask":"list","limit":1,"after":"` + strings.Repeat("k", 1025) + `"}`, signing{}, 400, "question-invalid"},
	} {
		t.Run(name, func(t *testing.T) { wantProblem(t, r.ask(t, "hostile: "+name, c.body, c.signing), c.status, c.problem) })
	}
	got := r.question(t, "by GET", describe, signing{})
	got.Method, got.Body, got.ContentLength = http.MethodGet, http.NoBody, 0
	refused, err := r.do(got)
	pgtest.Must(t, err)
	wantProblem(t, refused, 405, "method-not-allowed")

	// An answered question was a question, and so was one that was refused for its content. Neither
	// an event nor a question is the other.
	for key, body := range map[string]string{"once": describe, "hostile: something else": `{"ask":"payloads"}`} {
		captured := r.question(t, key, body, signing{})
		if key == "once" {
			if answered, err := r.do(captured); err != nil || answered.status != http.StatusOK || answered.text == "" {
				t.Errorf("%v %+v", err, answered)
			}
		}
		captured.Body = io.NopCloser(strings.NewReader(body))
		repeated, err := r.do(captured)
		pgtest.Must(t, err)
		wantProblem(t, repeated, 409, "question-repeated")
	}
	wantProblem(t, <-r.begin(t, r.url+"/reconcile", "k16", describe), 401, "signature-invalid")
	asked := r.question(t, "k16", invoice("INV-16"), signing{})
	asked.URL.Path = strings.TrimSuffix(asked.URL.Path, "/reconcile")
	refused, err = r.do(asked)
	pgtest.Must(t, err)
	wantProblem(t, refused, 401, "signature-invalid")
	if answered := r.ask(t, "by the old secret", describe, signing{secret: oldSecret}); answered.status != http.StatusOK {
		t.Errorf("%+v", answered)
	}
	r.wantRows(t, "k16", "INV-16", 0, 0)
}

func oneQuestionAtATime(t *testing.T, r *receiver) {
	const doubled, describe = `{"ask":"doubled","limit":1}`, `{"ask":"describe"}`
	release := r.hold(t)
	first, asked := make(chan answer, 1), r.question(t, "first", doubled, signing{})
	go func() {
		got, err := r.do(asked)
		if err != nil {
			got.text = err.Error()
		}
		first <- got
	}()
	r.held(t)
	wantProblem(t, r.ask(t, "second", describe, signing{}), 503, "receiver-busy")
	wantFirst(t, r.send(t, "k17", invoice("INV-17"), signing{})) // events do not wait
	release()
	if got := <-first; got.status != http.StatusOK {
		t.Errorf("the first: %+v", got)
	}
	if got := r.ask(t, "third", describe, signing{}); got.status != http.StatusOK {
		t.Errorf("afterwards: %+v", got)
	}
}

func questionWithoutDatabase(t *testing.T, r *receiver) {
	const unfinished = `{"ask":"unfinished","limit":1}`
	r.exec(t, "ALTER TABLE inbox_events RENAME TO away")
	got := r.ask(t, "without database", unfinished, signing{})
	wantProblem(t, got, 503, "database-unavailable")
	if strings.Contains(got.text, "inbox_events") {
		t.Errorf("the answer says %s", got.text)
	}
	r.exec(t, "ALTER TABLE away RENAME TO inbox_events")
	if got := r.ask(t, "with database", unfinished, signing{}); got.status != http.StatusOK {
		t.Errorf("afterwards: %+v", got)
	}
}

// newGoReceiver is the receiver in Go, with its own database.
func newGoReceiver(t *testing.T, server *localpg.Server) *receiver {
	t.Helper()
	r := &receiver{language: language{name: "go"}, server: server, client: &http.Client{Timeout: patience}}
	r.database(t)
	r.url = goReceiver(t, r.dsn)
	return r
}

// The statements of the three languages are the same, but for their placeholders.
func TestStatementsAreTheSame(t *testing.T) {
	t.Parallel()
	placeholder := regexp.MustCompile(`(\$[1-4]|%s)::`)
	read := func(name string) string {
		text, err := os.ReadFile(name)
		pgtest.Must(t, err)
		return strings.Join(strings.Fields(placeholder.ReplaceAllString(string(text), "?::")), " ")
	}
	_, statements, _ := strings.Cut(read("node/index.js"), "const QUESTION = ")
	statements, _, _ = strings.Cut(statements, "// Nested loops")
	n := 0
	for _, statement := range regexp.MustCompile("`[^`]+`").FindAllString(statements, -1) {
		n++
		for _, other := range []string{"python/outbox_relay_receiver/__init__.py", "java/Receiver.java"} {
			if !strings.Contains(read(other), strings.TrimSpace(strings.Trim(statement, "`"))) {
				t.Errorf("%s has no %s", other, statement)
			}
		}
	}
	testkit.Equal(t, "statements were found", n, 9)
}
