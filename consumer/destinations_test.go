package consumer_test

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// Two receivers in one database get the same events from one sender, as two destinations: each
// event takes effect in both.
func TestTwoReceiversOfOneSource(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		shop := receivertest.NewEnv(t, f, consumer.Config{Receiver: "shop"}, receivertest.Effect)
		chi := receivertest.NewEnvAt(t, f, shop.DSN, consumer.Config{Receiver: "chi"}, receivertest.Effect)
		const events = 20
		for i := range events {
			key := strconv.Itoa(i)
			receivertest.WantFirst(t, shop.Do(shop.NewRequest(key, "{}", receivertest.SentTo("shop"))), http.StatusCreated, `{"done":"`+key+`"}`)
			receivertest.WantFirst(t, chi.Do(chi.NewRequest(key, "{}", receivertest.SentTo("chi"))), http.StatusCreated, `{"done":"`+key+`"}`)
			receivertest.WantReplayed(t, shop.Do(shop.NewRequest(key, "{}", receivertest.SentTo("shop"))), http.StatusCreated, "")
		}
		testkit.Equal(t, "effects", shop.Count("SELECT count(*) FROM effect"), 2*events)
	})
}

// Two receivers that were given one name: the second destination's events are refused, and the log
// says what to set.
func TestOtherDestinationIsRefused(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{}, receivertest.Effect)
		receivertest.WantFirst(t, e.Do(e.NewRequest("k", "{}", receivertest.SentTo("shop-eu"))), http.StatusCreated, `{"done":"k"}`)
		e.WantResult(consumer.ResultProcessed)
		for _, body := range []string{"{}", "[]"} { // a body may differ from one destination to the next
			receivertest.WantProblem(t, e.Do(e.NewRequest("k", body, receivertest.SentTo("shop"))), http.StatusMisdirectedRequest, "other-destination")
			e.WantResult(consumer.ResultOtherDestination)
		}
		e.WantRows("k", 1, 1)
		for _, part := range []string{"level=ERROR", `as another destination than \"shop\"`, `Config.Receiver (\"test\")`, "its own Receiver"} {
			if !strings.Contains(e.Logged.String(), part) {
				t.Errorf("not logged: %s in %s", part, e.Logged)
			}
		}
		receivertest.WantReplayed(t, e.Do(e.NewRequest("k", "{}", receivertest.SentTo("shop-eu"))), http.StatusCreated, "")
		receivertest.WantReplayed(t, e.Do(e.NewRequest("k", "{}")), http.StatusCreated, "") // whose sender does not say
	})
}

// A request that a relay signed for one destination is brought to another receiver, which has the
// same secret.
func TestRequestForAnotherDestinationIsRefused(t *testing.T) {
	t.Parallel()
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{Destinations: []string{"chi", "shop-eu"}}, receivertest.Effect)
	elsewhere := func(h http.Header) { // the delivery's id is opaque
		h.Set(webhook.EventID, "4711")
		h.Set(webhook.DeliveryID, "4711-shop-eu-1")
		h.Set(webhook.Destination, "shop")
	}
	idAlone := func(h http.Header) {
		elsewhere(h)
		h.Del(webhook.Destination)
	}
	for _, sent := range []func(http.Header){receivertest.SentTo("shop"), receivertest.SentTo(""), func(http.Header) {}, elsewhere, idAlone} {
		receivertest.WantProblem(t, e.Do(e.NewRequest("k", "{}", sent)), http.StatusMisdirectedRequest, "wrong-destination")
		e.WantResult(consumer.ResultRejected)
	}
	e.WantRows("k", 0, 0)
	receivertest.WantFirst(t, e.Do(e.NewRequest("k", "{}", receivertest.SentTo("shop-eu"))), http.StatusCreated, `{"done":"k"}`)
	receivertest.WantReplayed(t, e.Do(e.NewRequest("k", "{}", receivertest.SentTo("shop-eu"))), http.StatusCreated, "")
}

// A foreign sender need not say to which destination it sends. Where its scheme does, that counts.
func TestSchemeMayNameTheDestination(t *testing.T) {
	t.Parallel()
	custom := func(h http.Header, _ []byte, _ time.Time) (consumer.Event, error) {
		return consumer.Event{IdempotencyKey: h.Get("Their-Id"), Destination: h.Get("Their-Destination")}, nil
	}
	e := receivertest.NewEnv(t, receivertest.PGX(), consumer.Config{Destinations: []string{"shop"}, Verify: consumer.Verify{Custom: custom}}, receivertest.Effect)
	send := func(destination string) receivertest.Response {
		return e.Do(e.NewRequest("k", "{}", receivertest.With("Their-Id", "k"+destination), receivertest.With("Their-Destination", destination), receivertest.SentTo("mall")))
	}
	receivertest.WantProblem(t, send("mall"), http.StatusMisdirectedRequest, "wrong-destination")
	receivertest.WantFirst(t, send("shop"), http.StatusCreated, `{"done":"kshop"}`)
	receivertest.WantFirst(t, send(""), http.StatusCreated, `{"done":"k"}`)
	testkit.Equal(t, "rows", e.Count(`SELECT count(*) FROM processed_events WHERE destination = 'shop' OR idempotency_key = 'k' AND destination IS NULL`), 2)
}

// One receiver that two destinations lead to, such as a URL and a stream, names both: an event that
// comes from both counts once.
func TestTwoDestinationsOfOneReceiver(t *testing.T) {
	receivertest.EachFlavour(t, func(t *testing.T, f receivertest.Flavour) {
		e := receivertest.NewEnv(t, f, consumer.Config{Destinations: []string{"web", "stream"}}, receivertest.Effect)
		for key, ways := range map[string][2]string{"a": {"web", "stream"}, "b": {"stream", "web"}} {
			receivertest.WantFirst(t, e.Do(e.NewRequest(key, "{}", receivertest.SentTo(ways[0]))), http.StatusCreated, `{"done":"`+key+`"}`)
			receivertest.WantReplayed(t, e.Do(e.NewRequest(key, "{}", receivertest.SentTo(ways[1]))), http.StatusCreated, "")
			receivertest.WantProblem(t, e.Do(e.NewRequest(key, "[]", receivertest.SentTo(ways[1]))), http.StatusUnprocessableEntity, "key-reused")
			e.WantRows(key, 1, 1)
		}
	})
}

// Two receivers in one database have a role each. The login of one neither sees nor changes a row
// of the other, and cannot keep an event away by the lock of its key. Both receive the same events,
// in every mode.
func TestSecurityReceiversAreKeptApart(t *testing.T) {
	t.Parallel()
	server := pgtest.StartCopy(t, localpg.Options{}) // roles belong to all of it
	pgtest.Migrate(t, server.DSN(""), migrations.Inbox)
	owner := pgtest.Pool(t, server.DSN(""))
	must := func(query string) {
		t.Helper()
		pgtest.Exec(t, owner, query, pgx.QueryExecModeSimpleProtocol)
	}
	must(receivertest.Schema + `
		CREATE ROLE shop_inbox_receiver_alpha; CREATE ROLE shop_inbox_receiver_beta;
		CREATE ROLE alpha LOGIN IN ROLE shop_inbox_receiver_alpha; CREATE ROLE beta LOGIN IN ROLE shop_inbox_receiver_beta;
		GRANT INSERT, SELECT ON effect TO alpha, beta`)
	for range 2 { // as after an upgrade
		must(`SET outbox_relay.role_prefix = 'shop_'; ` + migrations.Roles())
	}
	dsn := func(login string) string {
		u, err := url.Parse(server.DSN(""))
		pgtest.Must(t, err)
		u.User = url.User(login)
		return u.String()
	}
	count := func(query string) (n int) {
		t.Helper()
		pgtest.Must(t, owner.QueryRow(t.Context(), query).Scan(&n))
		return n
	}
	handle := func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		applied, err := consumer.ApplyIfNewer(ctx, tx, "invoice", "1", consumer.BySequence(1))
		if err == nil && !applied {
			t.Errorf("%s: another receiver's version counts", event.Receiver)
		}
		if err != nil {
			return err
		}
		if _, err := consumer.Once(ctx, tx, consumer.Event{Receiver: event.Receiver, Source: "other", IdempotencyKey: event.IdempotencyKey}); err != nil {
			return err
		}
		return receivertest.EffectOf(ctx, event.IdempotencyKey)
	}
	envs := map[string]*receivertest.Env{}
	for _, name := range []string{"alpha", "beta"} {
		worked := make(chan consumer.Report, 10)
		envs[name] = receivertest.StartEnv(t, receivertest.PGX(), dsn(name), consumer.Config{Receiver: name}, func(_ *receivertest.Env, cfg consumer.Config) http.Handler {
			mux := http.NewServeMux()
			mux.Handle("/", receivertest.Must(consumer.New(pgtest.Pool(t, dsn(name)), cfg, handle)))
			cfg.Observe = func(_ context.Context, r consumer.Report) {
				if r.Inbox {
					worked <- r
				}
			}
			box := receivertest.Must(inbox.New(pgtest.Pool(t, dsn(name)), inbox.Config{Config: cfg, Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
				return receivertest.EffectOf(ctx, event.IdempotencyKey)
			}}))
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan error, 1)
			go func() { ended <- box.Run(ctx) }()
			t.Cleanup(func() {
				cancel()
				if err := <-ended; err != nil {
					t.Errorf("Run: %v", err)
				}
			})
			mux.Handle("/inbox", box.Handler())
			return mux
		})
		receivertest.WantFirst(t, envs[name].Post("k", "{}"), http.StatusNoContent, "")
		if got := envs[name].Do(envs[name].NewRequestTo("/inbox", "recorded", "{}")); got.Status != http.StatusAccepted {
			t.Fatalf("%s: recorded with %d %s: %s", name, got.Status, got.Body, envs[name].Logged)
		}
		if r := <-worked; r.Result != consumer.ResultProcessed {
			t.Errorf("%s: worked with %+v", name, r)
		}
	}

	must(`INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at) VALUES ('alpha', 'outbox', '2020-01-01', now())`)
	beta, err := pgx.Connect(t.Context(), dsn("beta"))
	pgtest.Must(t, err)
	defer beta.Close(t.Context())
	const all = `(SELECT count(*) FROM processed_events WHERE receiver = 'alpha') + (SELECT count(*) FROM inbox_events WHERE receiver = 'alpha')
		+ (SELECT count(*) FROM inbox_freshness WHERE receiver = 'alpha') + (SELECT count(*) FROM inbox_forgotten WHERE receiver = 'alpha')`
	before := count("SELECT " + all)
	if before != 6 { // k by the middleware and by Once, recorded in both tables, a version, a mark
		t.Fatalf("alpha has %d rows", before)
	}
	for _, query := range []string{
		"SELECT " + all,
		"WITH gone AS (DELETE FROM processed_events WHERE receiver = 'alpha' RETURNING 1) SELECT count(*) FROM gone",
		"WITH gone AS (DELETE FROM inbox_events WHERE receiver <> 'beta' RETURNING 1) SELECT count(*) FROM gone",
		"WITH gone AS (DELETE FROM inbox_freshness WHERE receiver = 'alpha' RETURNING 1) SELECT count(*) FROM gone",
		"WITH mine AS (UPDATE processed_events SET receiver = 'beta' WHERE receiver = 'alpha' RETURNING 1) SELECT count(*) FROM mine",
		"WITH mine AS (UPDATE inbox_events SET payload = NULL WHERE receiver = 'alpha' RETURNING 1) SELECT count(*) FROM mine",
		"WITH mine AS (UPDATE inbox_forgotten SET received_before = '-infinity' WHERE receiver = 'alpha' RETURNING 1) SELECT count(*) FROM mine",
		"SELECT count(*) FROM (SELECT FROM inbox_events WHERE receiver = 'alpha' FOR UPDATE) locked",
	} {
		var n int
		if err := beta.QueryRow(t.Context(), query).Scan(&n); err != nil || n != 0 {
			t.Errorf("%s: %d, %v", query, n, err)
		}
	}
	for _, query := range []string{
		"INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('alpha', 'outbox', 'next', 'succeeded')",
		"INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state) VALUES ('alpha', 'outbox', 'next', 'pending')",
		"INSERT INTO inbox_freshness (receiver, scope, entity, sequence) VALUES ('alpha', 'invoice', '1', 1000) ON CONFLICT ON CONSTRAINT inbox_freshness_pkey DO UPDATE SET sequence = 1000",
		"INSERT INTO inbox_forgotten (receiver, source, received_before, announced_at) VALUES ('alpha', 'outbox', now() - interval '2 days', now())",
		"UPDATE processed_events SET receiver = 'alpha'", "TRUNCATE processed_events", "ALTER TABLE processed_events DISABLE ROW LEVEL SECURITY",
		"SET ROLE shop_inbox_receiver_alpha", "SET ROLE alpha", "SET row_security = off; SELECT FROM processed_events",
	} {
		if _, err := beta.Exec(t.Context(), query, pgx.QueryExecModeSimpleProtocol); err == nil {
			t.Errorf("%s: not refused", query)
		}
	}
	if n := count("SELECT " + all); n != before {
		t.Errorf("alpha has %d rows, want %d", n, before)
	}
	pgtest.Exec(t, beta, `SELECT pg_advisory_lock(hashtextextended(E'alpha\noutbox\nlocked', 122550254464888 # 'processed_events'::regclass::oid::bigint))`)
	must("DELETE FROM inbox_freshness")
	receivertest.WantFirst(t, envs["alpha"].Post("locked", "{}"), http.StatusNoContent, "")
	alpha, err := pgx.Connect(t.Context(), dsn("alpha"))
	pgtest.Must(t, err)
	defer alpha.Close(t.Context())
	pgtest.Exec(t, alpha, `SELECT pg_advisory_lock(hashtextextended(E'alpha\noutbox\nin flight', 122550254464888 # 'processed_events'::regclass::oid::bigint))`)
	testkit.Equal(t, "while its own login works it", envs["alpha"].Post("in flight", "{}").Status, http.StatusConflict)
}
