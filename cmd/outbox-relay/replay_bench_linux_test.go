package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli/events"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A replayReceiver counts how often each replayed event was sent.
type replayReceiver struct {
	live
	third, all chan struct{} // closed when so many of the replayed events were sent
	events     int
	replays    map[string]int
}

func (r *replayReceiver) answer(w http.ResponseWriter, req *http.Request) {
	if key := req.Header.Get("X-Idempotency-Key"); strings.HasPrefix(key, "old") {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.replays[key]++
		switch n := len(r.replays); {
		case r.replays[key] > 1:
		case n == r.events/3:
			close(r.third)
		case n == r.events:
			close(r.all)
		}
	}
	w.WriteHeader(http.StatusNoContent)
}

// A replayStage is a relay with failed events and live ones, of which 100 a second come in.
type replayStage struct {
	*testing.B
	*replayReceiver
	db    *relaytest.Database
	env   []string
	relay *relayProcess
	calm  time.Duration // for which the live events are measured alone
	end   func() int    // of the live events
}

func newReplayStage(b *testing.B) *replayStage {
	b.Helper()
	rc := &replayReceiver{replays: map[string]int{}, events: 100_000, third: make(chan struct{}), all: make(chan struct{})}
	rc.HandlerFunc = rc.answer
	s := &replayStage{B: b, replayReceiver: rc, calm: 20 * time.Second}
	if testing.Short() {
		s.events, s.calm = 1_000, time.Second
	}
	server := httptest.NewServer(rc)
	b.Cleanup(server.Close)
	s.db = relaytest.Covered(b, "default")
	s.db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 't', '{"n": 1}', 'old' || i FROM generate_series(1, $1) i`, s.events)
	s.db.Exec(`DROP TRIGGER relaytest_cover ON outbox`) // the relay takes the live ones
	s.db.Settled("failed", "true")
	s.db.Exec(`VACUUM ANALYZE outbox, outbox_delivery`)
	s.env = []string{"OUTBOX_DATABASE_URL=" + s.db.DSN, "OUTBOX_DESTINATION_URL=" + server.URL, "OUTBOX_METRICS_LISTEN=none", "OUTBOX_ADMIN_LISTEN=none"}
	s.relay = launchAs(s, s.TempDir(), []string{"run"}, s.env...)
	s.end = s.commit(b, s.db, 1)
	return s
}

// program returns a command.
func (s *replayStage) program(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(s.Context(), os.Args[0], args...)
	cmd.Env = append([]string{asProgram + "=1"}, s.env...)
	return cmd
}

// rest lets live events come alone.
func (s *replayStage) rest() { <-time.After(s.calm) }

// measure replays all failed events and compares the p99 of live events with that before and after.
func (s *replayStage) measure() {
	args := []string{"replay", "--destination", "default"}
	out, err := s.program(append(args, "--dry-run", "--json")...).Output()
	pgtest.Must(s, err)
	var report events.BulkReport
	if err := json.Unmarshal(out, &report); err != nil || report.Matched != int64(s.events) || report.Seconds != float64(s.events)/500 {
		s.Errorf("%s: %v", out, err)
	}
	killed := s.program(append(args, "--yes")...)
	before := s.during(s.rest)
	begun := time.Now()
	during := s.during(func() {
		pgtest.Must(s, killed.Start())
		<-s.third
		_ = killed.Process.Kill()
		_ = killed.Wait()
		if out, err := s.program(append(args, "--yes")...).CombinedOutput(); err != nil {
			s.Fatalf("%v: %s", err, out)
		}
		<-s.all // asking the database would add load
	})
	took := time.Since(begun)
	relaytest.Becomes(s.db, 0, `SELECT count(*)::int FROM outbox_delivery WHERE event_id <= $1 AND status <> 'delivered'`, s.events)
	after := s.during(s.rest)
	s.end()
	s.relay.stop(s)

	for key, n := range s.replays {
		if n != 1 {
			s.Errorf("%s was sent %d times", key, n)
		}
	}
	if done := relaytest.Row[int64](s.db, `SELECT sum(done)::bigint FROM outbox_audit WHERE action = 'replay'`); len(s.replays) != s.events || done != int64(s.events) {
		s.Errorf("%d events were sent, the audit has %d", len(s.replays), done)
	}
	s.ReportMetric(float64(s.events)/took.Seconds(), "replays/s")
	reportLive(s.B, before, during, after)
}

// BenchmarkReplayUnderLoad replays 100,000 failed events beside 100 live events a second. The
// command is killed on its way and given again. The relay lives, so that each event must be sent
// once.
func BenchmarkReplayUnderLoad(b *testing.B) {
	for b.Loop() {
		newReplayStage(b).measure()
	}
}
