package memory_test

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A login that may create objects in a schema of the search_path makes operators and functions for
// all types. No statement of receivers, producers and the migrator means one of them, and none is
// called.
func TestSecurityReceiverIsNotHijacked(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	dsn := pgtest.New(t, migrations.Inbox, migrations.Outbox)
	plain, err := pgx.Connect(t.Context(), pgtest.New(t, migrations.Inbox, migrations.Outbox))
	pgtest.Must(t, err)
	defer plain.Close(t.Context())
	pgtest.Exec(t, plain, receivertest.Schema)
	before := pgtest.Pool(t, dsn)
	pgtest.Exec(t, before, receivertest.Schema)
	(&receivertest.Env{T: t, Pool: before}).Old("outbox", "old", 3)
	decoys := pgtest.Hijack(t, dsn, "../..", "../../../migrations", "../../../outbox", "../../../internal/reconcile", "../../../internal/inboxsql")

	statements := pgtest.Statements(t, "../../..", "consumer", "consumer/inbox", "consumer/internal/memory", "consumer/sqlconsumer", "consumer/store", "outbox", "migrations",
		"internal/reconcile", "internal/inboxsql")
	for _, part := range append(decoys.WantUnusedIn(t, plain, statements), "consumer/inbox.recordHead", "internal/inboxsql.Kinds", "internal/inboxsql.promoteHead", "consumer/internal/memory.admitHead",
		"consumer/internal/memory.LastHead", "internal/reconcile.doubledSQL", "internal/reconcile.missingSQL") {
		delete(statements, part)
	}
	if len(statements) > 0 {
		t.Errorf("neither a statement nor known as a part of one: %q", statements)
	}

	for _, f := range receivertest.Flavours() {
		t.Run(f.Name, func(t *testing.T) {
			e := receivertest.NewEnvAt(t, f, dsn, consumer.Config{}, func(e *receivertest.Env) http.HandlerFunc {
				effect := receivertest.Effect(e)
				return func(w http.ResponseWriter, r *http.Request) {
					switch r.Header.Get("X-Do") {
					case "fail":
						http.Error(w, "no", http.StatusInternalServerError)
					case "commit":
						_ = e.Exec(r.Context(), "/* */ COMMIT AND CHAIN")
					case "path":
						if err := e.Exec(r.Context(), "SET search_path = pg_catalog"); err != nil {
							t.Error(err)
						}
					default:
						effect(w, r)
					}
				}
			})
			key := func(name string) string { return f.Name + name }
			do := func(name, how string) receivertest.Response {
				return e.Do(e.NewRequest(key(name), "{}", receivertest.With("X-Do", how)))
			}
			receivertest.WantFirst(t, e.Post(key("first"), "{}"), http.StatusCreated, `{"done":"`+key("first")+`"}`)
			receivertest.WantReplayed(t, e.Post(key("first"), "{}"), http.StatusCreated, "")
			receivertest.WantReplayed(t, e.Do(e.NewRequest(key("first"), "{}", receivertest.NotAfter(time.Now().Add(receivertest.Day)))), http.StatusCreated, "")
			receivertest.WantProblem(t, e.Post(key("first"), "[]"), 422, "key-reused")
			if got := do("failing", "fail"); got.Status != 500 {
				t.Errorf("%d %s", got.Status, got.Body)
			}
			receivertest.WantProblem(t, do("ended", "commit"), 500, "handler-ended-transaction")
			receivertest.WantFirst(t, do("path", "path"), 200, "")
			receivertest.WantFirst(t, do("after", "fine"), http.StatusCreated, `{"done":"`+key("after")+`"}`)
			if first, err := f.Once(t.Context(), e, "outbox", key("once"), func() {}); err != nil || !first {
				t.Error(first, err)
			}
			e.MustPrune(receivertest.Ninety())
			decoys.WantUnused(t, "the receiver")
		})
	}

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	failed := false
	box := receivertest.Must(inbox.New(pgtest.Pool(t, dsn), inbox.Config{
		Config: consumer.Config{Receiver: "test", Secrets: []string{receivertest.SecretText}}, Schedule: []time.Duration{time.Millisecond}, Workers: 1,
		Handle: func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
			if !failed {
				failed = true
				return receivertest.ErrHandler
			}
			return receivertest.EffectOf(ctx, event.IdempotencyKey)
		},
	}))
	e := receivertest.StartEnv(t, receivertest.PGX(), dsn, consumer.Config{}, func(*receivertest.Env, consumer.Config) http.Handler { return box.Handler() })
	for _, key := range []string{"1", "2", "2"} {
		if got := e.Do(e.NewRequest(key, "{}", receivertest.With(webhook.OrderingKey, "o"), receivertest.With(webhook.Sequence, key))); got.Status/100 != 2 {
			t.Errorf("%d %s", got.Status, got.Body)
		}
	}
	ended := make(chan error, 1)
	go func() { ended <- box.Run(ctx) }()
	e.Await("SELECT count(*) = 2 FROM inbox_events WHERE processing_state = 'succeeded'")
	stop()
	pgtest.Must(t, <-ended)
	decoys.WantUnused(t, "the inbox")
}
