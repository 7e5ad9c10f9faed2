package consumer_test

import (
	"context"
	"net/http"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/consumer/storetest"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// What is asked of every memory is asked of the database too.
func TestConformance(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		storetest.Run(t, storetest.Subject{
			Promises: storetest.Promises{EffectIsAtomic: true, SurvivesRestart: true},
			New: func(t testing.TB) storetest.Memory {
				memory, _ := databaseMemory(t, f, pgtest.New(t, migrations.Inbox))
				return memory
			},
			NewServer: func(t testing.TB) storetest.Memory {
				server := pgtest.StartCopy(t, localpg.Options{Settings: map[string]string{"synchronous_commit": "on"}}) // or the crash loses commits
				dsn := server.DSN("postgres")
				pgtest.Migrate(t, dsn, migrations.Inbox)
				m, pool := databaseMemory(t, f, dsn)
				m.Stop = func() {
					if err := server.StopImmediate(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				m.Start = func() {
					if err := server.StartAgain(t.Context()); err != nil {
						t.Fatal(err)
					}
					pool.Reset()
				}
				return m
			},
		})
	})
}

func databaseMemory(t testing.TB, f flavour, dsn string) (storetest.Memory, *pgxpool.Pool) {
	e := &env{t: t, pool: pgtest.Pool(t, dsn)}
	e.mustExec(schema)
	return storetest.Memory{
		Middleware: func(cfg store.Config) func(http.Handler) http.Handler { return f.wrap(t, dsn, cfg.Config) },
		Effect: func(ctx context.Context, key string) error {
			return f.exec(ctx, "INSERT INTO effect VALUES ($1)", key)
		},
		Effects: func(t testing.TB, key string) int {
			return (&env{t: t, pool: e.pool}).count("SELECT count(*) FROM effect WHERE key = $1", key)
		},
	}, e.pool
}

// The tests' own store keeps the promises of one, so that what store.Middleware does with stores is seen here as well.
func TestMapStoreConformance(t *testing.T) {
	t.Parallel()
	storetest.RunStore(t, func(testing.TB) store.Store { return newMapStore() })
	for name, survives := range map[string]bool{"on disk": true, "in memory": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			memory := func(testing.TB) storetest.Memory {
				kept := newMapStore()
				return storetest.Memory{
					Middleware: func(cfg store.Config) func(http.Handler) http.Handler {
						return consumer.Must(store.Middleware(kept, cfg))
					},
					Stop:  func() { kept.stop(!survives) },
					Start: kept.start,
				}
			}
			storetest.Run(t, storetest.Subject{
				Promises: storetest.Promises{SurvivesRestart: survives}, New: memory, NewServer: memory,
			})
		})
	}
}
