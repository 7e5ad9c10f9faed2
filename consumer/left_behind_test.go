package consumer_test

import (
	"context"
	"net/http"
	"testing"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// Large objects do not ask whether the transaction that they are for is over. They must not find another in its place.
func TestLargeObjectsEndWithTheirTransaction(t *testing.T) {
	t.Parallel()
	for name, answer := range answers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kept := make(chan receivertest.LargeObjects, 1)
			dsn := receivertest.WithSetting(pgtest.New(t, migrations.Inbox), "pool_max_conns", "1")
			e := newAnswering(t, receivertest.PGX(), dsn, answer, func(answer http.HandlerFunc) func(e *receivertest.Env) http.HandlerFunc {
				return func(e *receivertest.Env) http.HandlerFunc {
					return func(w http.ResponseWriter, r *http.Request) {
						receivertest.Effect(e)(receivertest.DiscardWriter{}, r)
						if consumer.EventFrom(r.Context()).Key == "first" {
							left, err := receivertest.WriteLargeObject(r.Context(), consumer.Tx(r.Context()))
							mustNot(e, err)
							kept <- left
						} else {
							(<-kept).Use(context.WithoutCancel(r.Context()), t)
						}
						answer(w, r)
					}
				}
			})
			for _, key := range []string{"first", "second"} {
				if got := e.Post(key, "{}"); got.Status/100 != 2 {
					t.Errorf("%s: answered %d %s", key, got.Status, got.Body)
				}
				e.WantRows(key, 1, 1)
			}
			if n := e.Count("SELECT count(*) FROM pg_largeobject_metadata m WHERE lo_get(m.oid) = 'kept'"); n != 1 {
				t.Errorf("%d large objects are as they were committed, want 1", n)
			}
			if n := e.Count("SELECT count(*) FROM pg_largeobject_metadata"); n != 1 {
				t.Errorf("there are %d large objects, want 1", n)
			}
		})
	}
}
