package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A replayReceiver counts how often each replayed event was sent, and how long live ones took from their commit.
type replayReceiver struct {
	mu      sync.Mutex
	replays map[string]int
	live    []time.Duration
}

func (r *replayReceiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	created, _ := time.Parse(time.RFC3339Nano, req.Header.Get("X-Outbox-Created-At"))
	took := time.Since(created)
	r.mu.Lock()
	defer r.mu.Unlock()
	if key := req.Header.Get("X-Idempotency-Key"); strings.HasPrefix(key, "old") {
		r.replays[key]++
	} else {
		r.live = append(r.live, took)
	}
	w.WriteHeader(http.StatusNoContent)
}

// p99 returns that of the live events since the last call, and forgets them.
func (r *replayReceiver) p99() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	slices.Sort(r.live)
	value := time.Duration(0)
	if n := len(r.live); n > 0 {
		value = r.live[n*99/100]
	}
	r.live = nil
	return value
}

// BenchmarkReplayUnderLoad replays 100,000 failed events by the command, which is killed on its way and run again, beside 100 live events a
// second; before and after the replay the same events go out alone. Each event must be sent once.
func BenchmarkReplayUnderLoad(b *testing.B) {
	events, calm := 100_000, 20*time.Second
	if testing.Short() {
		events, calm = 3_000, time.Second
	}
	for b.Loop() {
		rc := &replayReceiver{replays: map[string]int{}}
		server := httptest.NewServer(rc)
		defer server.Close()
		db := relaytest.New(b, "default")
		db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '{"n": 1}', 'old' || i FROM generate_series(1, $1) i`, events)
		db.Settled("failed", "true")
		db.Exec(`VACUUM ANALYZE outbox, outbox_delivery`)
		env := append(os.Environ(), asProgram+"=1", "OUTBOX_DATABASE_URL="+db.DSN, "OUTBOX_DESTINATION_URL="+server.URL, "OUTBOX_METRICS_LISTEN=off", "OUTBOX_ADMIN_LISTEN=off", "OUTBOX_LOG_LEVEL=error")
		program := func(args ...string) *exec.Cmd {
			cmd := exec.CommandContext(b.Context(), os.Args[0], args...)
			cmd.Env = env
			return cmd
		}
		relay := program("run")
		relaytest.Must(b, relay.Start())
		relaytest.Becomes(db, true, `SELECT EXISTS (SELECT FROM outbox_relay)`)
		ended, producing := make(chan struct{}), sync.WaitGroup{}
		producing.Go(func() {
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for n := 0; ; n++ {
				select {
				case <-tick.C:
					if _, err := db.Pool.Exec(b.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', $1)`, fmt.Sprint("live", n)); err != nil {
						b.Error(err)
						return
					}
				case <-ended:
					return
				}
			}
		})
		rest := func() time.Duration {
			rc.p99()
			<-time.After(calm)
			return rc.p99()
		}
		before := rest()
		began := time.Now()
		killed := program("replay", "--destination", "default", "--yes")
		relaytest.Must(b, killed.Start())
		relaytest.Eventually(b, "a part of the replay", func() bool {
			return relaytest.Row[int64](db, `SELECT coalesce(max(done), 0) FROM outbox_audit WHERE action = 'replay'`) >= int64(events/3)
		})
		_ = killed.Process.Kill()
		_ = killed.Wait()
		if out, err := program("replay", "--destination", "default", "--yes").CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, out)
		}
		relaytest.Becomes(db, 0, `SELECT count(*)::int FROM outbox_delivery WHERE event_id <= $1 AND status <> 'delivered'`, events)
		took, during := time.Since(began), rc.p99()
		after := rest()
		close(ended)
		producing.Wait()
		_ = relay.Process.Signal(os.Interrupt)
		_ = relay.Wait()
		for key, n := range rc.replays {
			if n != 1 {
				b.Errorf("%s was sent %d times", key, n)
			}
		}
		if done := relaytest.Row[int64](db, `SELECT sum(done)::bigint FROM outbox_audit WHERE action = 'replay'`); len(rc.replays) != events || done != int64(events) {
			b.Errorf("%d events were sent, the audit has %d", len(rc.replays), done)
		}
		alone := (before + after) / 2
		b.ReportMetric(float64(before.Microseconds())/1000, "ms-p99-before")
		b.ReportMetric(float64(during.Microseconds())/1000, "ms-p99-during")
		b.ReportMetric(float64(after.Microseconds())/1000, "ms-p99-after")
		b.ReportMetric(float64(during)/float64(alone), "x-p99")
		b.ReportMetric(float64(events)/took.Seconds(), "replays/s")
		b.ReportMetric(0, "ns/op")
	}
}
