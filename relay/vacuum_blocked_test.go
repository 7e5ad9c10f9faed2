package relay

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay/policy"
	"github.com/outbox-relay/outbox-relay/relay/post"
)

// BenchmarkVacuumBlocked drains events while other sessions keep the database from cleaning up, from before the first is
// inserted until the last is delivered, and reports the throughput of the last tenth as a share of that of the first. It
// fails unless the alert names such a session. A million events with -full.
func BenchmarkVacuumBlocked(b *testing.B) {
	events := 20_000
	if *full {
		events = 1_000_000
	}
	for name, sessions := range map[string]int{"IdleInTransaction": 1, "RepeatableReadReaders": 4} {
		b.Run(name, func(b *testing.B) {
			var share float64
			for b.Loop() {
				share += drainPinned(b, events, sessions)
			}
			b.ReportMetric(share/float64(b.N), "last/first")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func drainPinned(b *testing.B, events, sessions int) (share float64) {
	db := newDatabase(b)
	rc := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	defer rc.Close()
	var pids []int
	for range sessions {
		conn, err := pgx.Connect(b.Context(), db.dsn+"&application_name=pinning")
		must(b, err)
		defer func() { _ = conn.Close(context.WithoutCancel(b.Context())) }()
		isolation := "READ COMMITTED"
		if sessions > 1 {
			isolation = "REPEATABLE READ"
		}
		_, err = conn.Exec(b.Context(), "BEGIN ISOLATION LEVEL "+isolation+"; CREATE TEMP TABLE pin (); SELECT count(*) FROM outbox")
		must(b, err)
		var pid int
		must(b, conn.QueryRow(b.Context(), "SELECT pg_backend_pid()").Scan(&pid))
		pids = append(pids, pid)
	}
	for done := 0; done < events; done += 20_000 {
		db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '{"n": 1}', 'key-' || i FROM generate_series($1::int, $2) i`, done+1, done+20_000)
	}
	ops := &pager{name: "ops"}
	cfg := db.config(post.Destination{Name: "default", URL: rc.URL})
	cfg.Alerts = alert.Config{Channels: []alert.Channel{ops}, VacuumBlockedOver: time.Second}
	cfg.Watching.Interval = 5 * time.Second
	var mu sync.Mutex
	settled := 0
	tenths := []time.Time{}
	done := make(chan struct{})
	cfg.Hooks.Settled = func(_ string, outcome policy.Outcome, _ policy.Reason, n int) {
		if outcome != policy.Delivered {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		settled += n
		for len(tenths) <= 10 && settled >= len(tenths)*events/10 {
			tenths = append(tenths, time.Now())
		}
		if settled == events {
			close(done)
		}
	}
	relay, err := New(cfg)
	must(b, err)
	running, stop := context.WithCancel(b.Context())
	var runs sync.WaitGroup
	runs.Go(func() { must(b, relay.Run(running)) })
	<-done
	eventually(b, "the alert about the vacuum", func() bool { return len(ops.of(alert.RuleVacuumBlocked)) > 0 })
	stop()
	runs.Wait()
	first, last := tenths[1].Sub(tenths[0]), tenths[10].Sub(tenths[9])
	text := ops.of(alert.RuleVacuumBlocked)[0].Text()
	named := false
	for _, pid := range pids {
		named = named || strings.Contains(text, strconv.Itoa(pid))
	}
	if !named || !strings.Contains(text, "pinning") {
		b.Errorf("the alert names none of the sessions %v: %s", pids, text)
	}
	b.Logf("%d events: first tenth %s, last %s; alert: %s", events, first.Round(time.Millisecond), last.Round(time.Millisecond), text)
	return first.Seconds() / last.Seconds()
}
