package consumer_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/reconcile"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// asked is the handler of Reconcile, beside a receiver of the same configuration.
type asked struct {
	*receivertest.Env
	deliveries *receivertest.Env
	questions  int
}

func newAsked(t *testing.T, cfg consumer.Config) *asked {
	t.Helper()
	a := &asked{deliveries: receivertest.NewEnv(t, receivertest.PGX(), cfg, receivertest.Effect)}
	a.Env = receivertest.StartEnv(t, receivertest.PGX(), a.deliveries.DSN, cfg, func(e *receivertest.Env, cfg consumer.Config) http.Handler {
		h, err := consumer.Reconcile(pgtest.Pool(t, e.DSN), consumer.ReconcileConfig{Config: cfg, Effects: "SELECT key FROM effect"})
		pgtest.Must(t, err)
		return h
	})
	return a
}

// question is what the command sends, under its own key.
func (a *asked) question(body string, secret webhook.Secret, change ...func(http.Header)) *http.Request {
	a.T.Helper()
	a.questions++
	r, err := http.NewRequestWithContext(a.T.Context(), http.MethodPost, a.URL, strings.NewReader(body))
	pgtest.Must(a.T, err)
	r.Header.Set(webhook.IdempotencyKey, fmt.Sprint("question-", a.questions))
	r.Header.Set(webhook.Reconcile, "shop")
	webhook.Sign(r.Header, []byte(body), time.Now(), secret)
	for _, f := range change {
		f(r.Header)
	}
	return r
}

func (a *asked) answer(q reconcile.Request) (answer reconcile.Answer) {
	a.T.Helper()
	body, err := json.Marshal(q)
	pgtest.Must(a.T, err)
	got := a.Do(a.question(string(body), derived()))
	if got.Status != http.StatusOK || got.Header.Get("Cache-Control") != "no-store" || json.Unmarshal([]byte(got.Body), &answer) != nil {
		a.T.Fatalf("status %d: %s", got.Status, got.Body)
	}
	return answer
}

func derived() webhook.Secret { return receivertest.Secret().For(webhook.ReconcilePurpose) }

const describe = `{"ask":"describe"}`

// Only what was received for this receiver, from this source, is told, and nothing of its content.
func TestReconcileAnswersForItsOwnRows(t *testing.T) {
	t.Parallel()
	a := newAsked(t, consumer.Config{})
	for i := range 5 {
		if got := a.deliveries.Post(fmt.Sprint("k", i), `{"private":true}`); got.Status != http.StatusCreated {
			t.Fatalf("status %d: %s", got.Status, got.Body)
		}
	}
	a.MustExec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, payload)
		SELECT r, s, 'k' || i, 'succeeded', 'private' FROM generate_series(1, 9) i, (VALUES ('test', 'other'), ('other', 'outbox')) v (r, s)`)
	a.MustExec(`INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state, inbox_id, payload)
		SELECT r, s, 'waits', 'failed', row_number() OVER (), 'private' FROM (VALUES ('test', 'other'), ('other', 'outbox')) v (r, s)`)
	a.MustExec(`INSERT INTO effect VALUES ('k3')`)

	if got := a.answer(reconcile.Request{Ask: reconcile.AskDescribe}); got.Receiver != "test" || got.Source != "outbox" || !got.CountsEffects {
		t.Errorf("described %+v", got)
	}
	got := a.answer(reconcile.Request{Ask: reconcile.AskDigest, Salt: reconcile.NewSalt(), Bounds: []string{"k2"}})
	if len(got.Ranges) != 2 || got.Ranges[0].Count != 3 || got.Ranges[1].Count != 2 {
		t.Errorf("digest %+v", got)
	}
	var keys []string
	for _, h := range a.answer(reconcile.Request{Ask: reconcile.AskList, Limit: 100}).Held {
		keys = append(keys, h.Key)
	}
	testkit.Equal(t, "listed", keys, []string{"k0", "k1", "k2", "k3", "k4"})
	if got := a.answer(reconcile.Request{Ask: reconcile.AskFind, Keys: []string{"k1", "k8"}}).Held; len(got) != 1 || got[0].Key != "k1" {
		t.Errorf("found %+v", got)
	}
	if got := a.answer(reconcile.Request{Ask: reconcile.AskUnfinished, Limit: 9}).Held; len(got) != 0 {
		t.Errorf("unfinished %+v", got)
	}
	if got := a.answer(reconcile.Request{Ask: reconcile.AskDoubled, Limit: 9}).Held; len(got) != 1 || got[0].Key != "k3" {
		t.Errorf("doubled %+v", got)
	}
	a.MustExec(`DELETE FROM effect WHERE key = 'k4'`)
	if got := a.answer(reconcile.Request{Ask: reconcile.AskMissing, Limit: 9}).Held; len(got) != 1 || got[0].Key != "k4" {
		t.Errorf("missing %+v", got)
	}
	for _, ask := range []string{reconcile.AskDescribe, reconcile.AskList, reconcile.AskFind, reconcile.AskUnfinished, reconcile.AskDoubled, reconcile.AskMissing} {
		body := fmt.Sprintf(`{"ask":%q,"limit":100,"keys":["k1","waits"]}`, ask)
		if got := a.Do(a.question(body, derived())); got.Status != http.StatusOK || strings.Contains(got.Body, "private") {
			t.Errorf("%s: %d %s", ask, got.Status, got.Body)
		}
	}
}

// What does not come from the sender's operator now gets nothing.
func TestSecurityReconcileRefusesStrangers(t *testing.T) {
	t.Parallel()
	a := newAsked(t, consumer.Config{Destinations: []string{"shop"}})
	signed := func(at time.Time) func(http.Header) {
		return func(h http.Header) { webhook.Sign(h, []byte(describe), at, derived()) }
	}
	set := func(name, value string) func(http.Header) { return func(h http.Header) { h.Set(name, value) } }
	for name, refused := range map[string]struct {
		request *http.Request
		status  int
		problem string
	}{
		"unsigned":                    {a.question(describe, derived(), func(h http.Header) { h.Del(webhook.Signature) }), 401, "signature-invalid"},
		"another secret":              {a.question(describe, receivertest.OtherSecret().For(webhook.ReconcilePurpose)), 401, "signature-invalid"},
		"the secret of deliveries":    {a.question(describe, receivertest.Secret()), 401, "signature-invalid"},
		"a changed key":               {a.question(describe, derived(), set(webhook.IdempotencyKey, "another")), 401, "signature-invalid"},
		"a changed destination":       {a.question(describe, derived(), set(webhook.Reconcile, "another")), 401, "signature-invalid"},
		"the weaker signature":        {a.question(describe, derived(), func(h http.Header) { h.Set(webhook.Signature, strings.Fields(h.Get(webhook.Signature))[0]) }), 401, "signature-invalid"},
		"from long ago":               {a.question(describe, derived(), signed(time.Now().Add(-time.Hour))), 401, "timestamp-out-of-tolerance"},
		"from the future":             {a.question(describe, derived(), signed(time.Now().Add(time.Hour))), 401, "timestamp-out-of-tolerance"},
		"for another":                 {a.question(describe, derived(), set(webhook.Reconcile, "mall"), signed(time.Now())), 421, "wrong-destination"},
		"too large":                   {a.question(strings.Repeat(" ", 1<<20+1), derived()), 413, "body-too-large"},
		"no JSON":                     {a.question(`ask`, derived()), 400, "question-invalid"},
		"what is not known":           {a.question(`{"ask":"describe","receiver":"other"}`, derived()), 400, "question-invalid"},
		"a huge range":                {a.question(`{"ask":"list","limit":1000000}`, derived()), 400, "question-invalid"},
		"too many keys":               {a.question(`{"ask":"find","keys":["k"`+strings.Repeat(`,"k"`, 1000)+`]}`, derived()), 400, "question-invalid"},
		"a digest without a salt":     {a.question(`{"ask":"digest"}`, derived()), 400, "question-invalid"},
		"a question that is no POST":  {get(a.question(describe, derived())), 405, "method-not-allowed"},
		"a body that was not signed":  {exchanged(a.question(describe, derived()), `{"ask":"list","limit":9}`), 401, "signature-invalid"},
		"a delivery, sent here again": {a.deliveries.NewRequestTo(a.URL, "k", describe), 401, "signature-invalid"},
	} {
		t.Run(name, func(t *testing.T) {
			receivertest.WantProblem(t, a.Do(refused.request), refused.status, refused.problem)
		})
	}
	receivertest.WantProblem(t, a.Do(a.deliveries.NewRequestTo(a.deliveries.URL, "k", describe, receivertest.SentTo("mall"))), 421, "wrong-destination")
	// The other way round, a question is no event.
	r := a.question(describe, derived())
	r.URL = a.deliveries.NewRequest("k", "").URL
	receivertest.WantProblem(t, a.Do(r), 401, "signature-invalid")
	testkit.Equal(t, "rows were written", a.Count("SELECT count(*) FROM processed_events"), 0)
}

func get(r *http.Request) *http.Request {
	r.Method = http.MethodGet
	return r
}

func exchanged(r *http.Request, body string) *http.Request {
	other := r.Clone(r.Context())
	fresh, _ := http.NewRequestWithContext(r.Context(), r.Method, r.URL.String(), strings.NewReader(body))
	fresh.Header = other.Header
	return fresh
}

// A captured question is answered once, whatever else is asked meanwhile.
func TestSecurityQuestionIsAnsweredOnce(t *testing.T) {
	t.Parallel()
	a := newAsked(t, consumer.Config{})
	captured := a.question(describe, derived())
	again := func() *http.Request { return exchanged(captured, describe) }
	if got := a.Do(again()); got.Status != http.StatusOK {
		t.Fatalf("status %d: %s", got.Status, got.Body)
	}
	for range 2 {
		receivertest.WantProblem(t, a.Do(again()), 409, "question-repeated")
	}
	if got := a.Do(a.question(describe, derived())); got.Status != http.StatusOK {
		t.Errorf("another one: status %d: %s", got.Status, got.Body)
	}
	// Refused for its content, a question is used up as well.
	bad := a.question(`{"ask":"payloads"}`, derived())
	receivertest.WantProblem(t, a.Do(exchanged(bad, `{"ask":"payloads"}`)), 400, "question-invalid")
	receivertest.WantProblem(t, a.Do(exchanged(bad, `{"ask":"payloads"}`)), 409, "question-repeated")
}

// One question at a time reads the table; a second one is told to come again.
func TestSecurityOneQuestionAtATime(t *testing.T) {
	t.Parallel()
	entered, release := make(chan struct{}, 1), make(chan struct{})
	dsn := pgtest.New(t, migrations.Inbox)
	pool := pgtest.PoolWith(t, dsn, func(cfg *pgxpool.Config) {
		cfg.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
			entered <- struct{}{}
			<-release
			return true, nil
		}
	})
	a := &asked{Env: receivertest.StartEnv(t, receivertest.PGX(), dsn, consumer.Config{}, func(_ *receivertest.Env, cfg consumer.Config) http.Handler {
		return receivertest.Must(consumer.Reconcile(pool, consumer.ReconcileConfig{Config: cfg}))
	})}
	first, question := make(chan int, 1), a.question(describe, derived())
	go func() {
		got, _ := a.Try(question)
		first <- got.Status
	}()
	<-entered
	receivertest.WantProblem(t, a.Do(a.question(describe, derived())), 503, "receiver-busy")
	close(release)
	testkit.Equal(t, "the first: status", <-first, http.StatusOK)
	if got := a.Do(a.question(describe, derived())); got.Status != http.StatusOK {
		t.Errorf("afterwards: status %d: %s", got.Status, got.Body)
	}
}

// What goes wrong in the database is in the log, and not in the answer.
func TestReconcileWithoutDatabase(t *testing.T) {
	t.Parallel()
	a := newAsked(t, consumer.Config{})
	a.MustExec("DROP TABLE inbox_events")
	got := a.Do(a.question(`{"ask":"unfinished","limit":9}`, derived()))
	receivertest.WantProblem(t, got, 503, "database-unavailable")
	if strings.Contains(got.Body, "inbox_events") || !strings.Contains(a.Logged.String(), "inbox_events") {
		t.Errorf("answer %s, log %s", got.Body, a.Logged)
	}
}

// The effects of ten million events are counted for longer than a handler may take. The statements
// have bounds of their own.
func TestAnswersMayTakeLongerThanHandlers(t *testing.T) {
	t.Parallel()
	a := newAsked(t, consumer.Config{Limits: consumer.Limits{HandlerTimeout: time.Nanosecond}})
	a.answer(reconcile.Request{Ask: reconcile.AskMissing, Limit: 9})
}

func TestReconcileConfig(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.New(t, migrations.Inbox))
	good := consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}, Limits: consumer.Limits{MaxBodyBytes: 10, MaxUnverifiedBytes: 10}}
	if _, err := consumer.Reconcile(pool, consumer.ReconcileConfig{Config: good}); err != nil {
		t.Error(err)
	}
	open := consumer.Config{Receiver: "test", Verify: consumer.Verify{AllowUnsigned: true}}
	for want, f := range map[string]func() (http.Handler, error){
		"needs a pool": func() (http.Handler, error) { return consumer.Reconcile(nil, consumer.ReconcileConfig{Config: good}) },
		"needs Config.Secrets: anyone could ask": func() (http.Handler, error) {
			return consumer.Reconcile(pool, consumer.ReconcileConfig{Config: open})
		},
		"Config.Secrets is empty": func() (http.Handler, error) { return consumer.Reconcile(pool, consumer.ReconcileConfig{}) },
	} {
		if _, err := f(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

// The memory of questions has an end, and does not forget one whose timestamp is still accepted.
func TestSecurityMemoryOfQuestionsIsBounded(t *testing.T) {
	t.Parallel()
	cfg := consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}, Logger: slog.New(slog.DiscardHandler)}
	h, err := consumer.Reconcile(pgtest.Pool(t, pgtest.New(t, migrations.Inbox)), consumer.ReconcileConfig{Config: cfg})
	pgtest.Must(t, err)
	const bad = `{}` // refused after it was remembered, without the database
	statuses := map[int]int{}
	for i := range 10_100 {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "/", strings.NewReader(bad))
		pgtest.Must(t, err)
		r.Header.Set(webhook.IdempotencyKey, strconv.Itoa(i))
		webhook.Sign(r.Header, []byte(bad), time.Now(), derived())
		w := &statusWriter{header: http.Header{}}
		h.ServeHTTP(w, r)
		statuses[w.status]++
	}
	if statuses[400] != 10_000 || statuses[503] != 100 {
		t.Errorf("statuses %v", statuses)
	}
}

// statusWriter keeps the status of an answer.
type statusWriter struct {
	header http.Header
	status int
}

func (w *statusWriter) Header() http.Header         { return w.header }
func (w *statusWriter) Write(p []byte) (int, error) { return len(p), nil }
func (w *statusWriter) WriteHeader(status int)      { w.status = status }
