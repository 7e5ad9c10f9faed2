package consumer_test

import (
	"context"
	"io"
	"net/http"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// largeObjects is what a handler has left behind.
type largeObjects struct {
	all pgx.LargeObjects
	one *pgx.LargeObject
}

func writeLargeObject(ctx context.Context, tx pgx.Tx) (largeObjects, error) {
	kept := largeObjects{all: tx.LargeObjects()}
	oid, err := kept.all.Create(ctx, 0)
	if err == nil {
		kept.one, err = kept.all.Open(context.WithoutCancel(ctx), oid, pgx.LargeObjectModeWrite)
	}
	if err == nil {
		_, err = io.WriteString(kept.one, "kept")
	}
	return kept, err
}

// use tries to write into whatever transaction it reaches, and must reach none.
func (l largeObjects) use(ctx context.Context, t *testing.T) {
	if oid, err := l.all.Create(ctx, 0); err == nil {
		t.Errorf("large object %d is created in the transaction of another event", oid)
	}
	if _, err := l.one.Write([]byte("late")); err == nil {
		t.Error("a large object is written in the transaction of another event")
	}
}

// Large objects do not ask whether the transaction that they are for is over. They must not find another in its place.
func TestLargeObjectsEndWithTheirTransaction(t *testing.T) {
	t.Parallel()
	for name, answer := range answers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kept := make(chan largeObjects, 1)
			dsn := withSetting(pgtest.New(t, migrations.Inbox), "pool_max_conns", "1")
			e := newAnswering(t, flavours[0], dsn, answer, func(answer http.HandlerFunc) func(e *env) http.HandlerFunc {
				return func(e *env) http.HandlerFunc {
					return func(w http.ResponseWriter, r *http.Request) {
						effect(e)(discardWriter{}, r)
						if consumer.EventFrom(r.Context()).Key == "first" {
							left, err := writeLargeObject(r.Context(), consumer.Tx(r.Context()))
							mustNot(e, err)
							kept <- left
						} else {
							(<-kept).use(context.WithoutCancel(r.Context()), t)
						}
						answer(w, r)
					}
				}
			})
			for _, key := range []string{"first", "second"} {
				if got := e.post(key, "{}"); got.status/100 != 2 {
					t.Errorf("%s: answered %d %s", key, got.status, got.body)
				}
				e.wantRows(key, 1, 1)
			}
			if n := e.count("SELECT count(*) FROM pg_largeobject_metadata m WHERE lo_get(m.oid) = 'kept'"); n != 1 {
				t.Errorf("%d large objects are as they were committed, want 1", n)
			}
			if n := e.count("SELECT count(*) FROM pg_largeobject_metadata"); n != 1 {
				t.Errorf("there are %d large objects, want 1", n)
			}
		})
	}
}

func TestInboxLargeObjectsEndWithTheirTransaction(t *testing.T) {
	t.Parallel()
	kept := make(chan largeObjects, 1)
	cfg := inbox.Config{Workers: 1, Handle: func(ctx context.Context, _ pgx.Tx, event consumer.Event) error {
		if event.Key == "first" {
			left, err := writeLargeObject(ctx, consumer.Tx(ctx))
			kept <- left
			return err
		}
		(<-kept).use(context.WithoutCancel(ctx), t)
		return effectOf(ctx, event.Key)
	}}
	p := newInbox(t, cfg)
	p.openOn(poolOf(t, p.dsn, 2), cfg)
	p.run()
	for _, key := range []string{"first", "second"} {
		p.record(key)
		p.wantWorked(key, consumer.ResultProcessed)
	}
	if n := p.count("SELECT count(*) FROM pg_largeobject_metadata"); n != 1 {
		t.Errorf("there are %d large objects, want 1", n)
	}
}
