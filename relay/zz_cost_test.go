package relay

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

type counting struct{ n atomic.Int64 }

func (c *counting) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n.Add(1)
	return ctx
}
func (c *counting) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData)                {}
func (c *counting) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	c.n.Add(1)
	return ctx
}
func (c *counting) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (c *counting) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

func TestZZCost(t *testing.T) {
	for _, lanes := range []int{2, 50, 1000} {
		var names []string
		for i := range lanes {
			names = append(names, fmt.Sprintf("d%d", i))
		}
		db := newDatabase(t, names...)
		db.exec(`DELETE FROM outbox_route`)
		rc := newReceiver(t, nil)
		down := newReceiver(t, status(http.StatusServiceUnavailable))
		var ds []Destination
		var routes []Route
		for i, n := range names {
			d := to(rc.URL)
			d.Name = n
			if i == 0 {
				d.URL = down.URL
			}
			if i == 1 {
				d.RateLimit = 10
			}
			ds = append(ds, d)
			routes = append(routes, Route{Event: "to." + n, To: []string{n}})
		}
		cfg := db.config(ds...)
		cfg.Routes = routes
		cfg.PollInterval = 5 * time.Second
		c := &counting{}
		cfg.Pool.ConnConfig.Tracer = c
		var slow atomic.Int64
		r := start(t, cfg)
		r.instance()
		measure := func(what string, d time.Duration) {
			before := c.n.Load()
			<-time.After(d)
			t.Logf("%d lanes: %s: %.1f statements/s", lanes, what, float64(c.n.Load()-before)/d.Seconds())
		}
		_ = &slow
		db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'to.d0', '{}', gen_random_uuid() FROM generate_series(1, 1000)`)
		becomes(db, "open", `SELECT coalesce((SELECT breaker FROM outbox_destination), '')`)
		<-time.After(10 * time.Second)
		measure("one held, else idle", 20*time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			for ctx.Err() == nil {
				_, _ = db.pool.Exec(ctx, `INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'to.d0', '{}', gen_random_uuid()`)
				<-time.After(20 * time.Millisecond)
			}
		}()
		<-time.After(3 * time.Second)
		measure("one held, producers active for it", 15*time.Second)
		cancel()
		<-done
		db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'to.d1', '{}', gen_random_uuid() FROM generate_series(1, 1000)`)
		<-time.After(2 * time.Second)
		measure("one at 10/s with a backlog", 10*time.Second)
		if lanes == 1000 {
			began := time.Now()
			asks := []ask{}
			for _, l := range r.laneList() {
				asks = append(asks, ask{lane: l, destination: l.name, free: 64, run: 16, followers: 2000, after: keyset{at: time.Now().Add(-2 * time.Second)}})
			}
			for range 10 {
				if _, _, err := r.store.claim(t.Context(), r.instance(), time.Minute, asks); err != nil {
					t.Fatal(err)
				}
			}
			t.Logf("1000 live asks: %s a claim", time.Since(began)/10)
		}
		if lanes == 50 {
			for _, fill := range []bool{false, true} {
				if fill {
					db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'to.d' || (2 + i % 48), '{}', gen_random_uuid() FROM generate_series(1, 20) i`)
				}
				var asks []ask
				for _, l := range r.laneList() {
					for cl := range class(classes) {
						asks = append(asks, ask{lane: l, destination: l.name, class: cl, free: 64, run: 16, followers: 2000, after: keyset{at: time.Now().Add(-2 * time.Second)}})
					}
				}
				began := time.Now()
				for range 20 {
					if _, _, err := r.store.claim(t.Context(), r.instance(), time.Minute, asks); err != nil {
						t.Fatal(err)
					}
				}
				t.Logf("150 asks: %s a claim", time.Since(began)/20)
			}
		}
		r.stop()
	}
}
