package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
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
	s.env = []string{"OUTBOX_DATABASE_URL=" + s.db.DSN, "OUTBOX_DESTINATION_URL=" + server.URL, "OUTBOX_METRICS_LISTEN=none", "OUTBOX_ADMIN_TOKEN=" + pageToken, "OUTBOX_ADMIN_PATH_PREFIX=/outbox"}
	s.relay = s.launch("OUTBOX_ADMIN_LISTEN=none")
	s.end = s.commit(b, s.db, 1)
	return s
}

// launch starts a relay.
func (s *replayStage) launch(env ...string) *relayProcess {
	return launchAs(s, s.TempDir(), []string{"run"}, append(slices.Clone(s.env), env...)...)
}

// program returns a command.
func (s *replayStage) program(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(s.Context(), os.Args[0], args...)
	cmd.Env = append([]string{asProgram + "=1"}, s.env...)
	return cmd
}

// rest lets live events come alone.
func (s *replayStage) rest() { <-time.After(s.calm) }

// A replayWay is how an operator replays: the preview, the order, the SIGKILL of the process that
// works on it, and what makes it continue.
type replayWay struct{ preview, order, kill, prepare, goOn func() }

// measure replays all failed events, is interrupted by SIGKILL, continues, and compares the p99 of
// live events with that before and after.
func (s *replayStage) measure(way replayWay) {
	way.preview()
	before := s.during(s.rest)
	begun := time.Now()
	during := s.during(func() {
		way.order()
		<-s.third
		way.kill()
	})
	took := time.Since(begun)
	way.prepare()
	begun = time.Now()
	during = append(during, s.during(func() {
		way.goOn()
		<-s.all // asking the database would add load
	})...)
	slices.Sort(during)
	took += time.Since(begun)
	relaytest.Becomes(s.db, 0, `SELECT count(*)::int FROM outbox_delivery WHERE event_id <= $1 AND status <> 'delivered'`, s.events)
	after := s.during(s.rest)
	s.end()
	s.relay.stop(s)

	sent := 0
	for _, n := range s.replays {
		sent += n
	}
	if done := relaytest.Row[int64](s.db, `SELECT sum(done)::bigint FROM outbox_audit WHERE action = 'replay'`); len(s.replays) != s.events || done != int64(s.events) {
		s.Errorf("%d events were sent, the audit has %d", len(s.replays), done)
	}
	s.ReportMetric(float64(s.events)/took.Seconds(), "replays/s")
	s.ReportMetric(float64(sent-s.events), "resent")
	reportLive(s.B, before, during, after)
}

// BenchmarkReplayUnderLoad replays 100,000 failed events beside 100 live events a second, by the
// command and on the page. The process that replays is killed on its way, and the replay continues.
func BenchmarkReplayUnderLoad(b *testing.B) {
	b.Run("command", func(b *testing.B) {
		for b.Loop() {
			replayByCommand(b)
		}
	})
	b.Run("page", func(b *testing.B) {
		for b.Loop() {
			replayOnThePage(b)
		}
	})
}

// replayByCommand kills the command and gives it again. The relay lives, so that each event must be
// sent once.
func replayByCommand(b *testing.B) {
	b.Helper()
	s := newReplayStage(b)
	args := []string{"replay", "--destination", "default"}
	killed := s.program(append(args, "--yes")...)
	s.measure(replayWay{
		preview: func() {
			out, err := s.program(append(args, "--dry-run", "--json")...).Output()
			pgtest.Must(b, err)
			var report events.BulkReport
			if err := json.Unmarshal(out, &report); err != nil || report.Matched != int64(s.events) || report.Seconds != float64(s.events)/500 {
				b.Errorf("%s: %v", out, err)
			}
		},
		order: func() { pgtest.Must(b, killed.Start()) },
		kill: func() {
			_ = killed.Process.Kill()
			_ = killed.Wait()
		},
		prepare: func() {},
		goOn: func() {
			if out, err := s.program(append(args, "--yes")...).CombinedOutput(); err != nil {
				b.Fatalf("%v: %s", err, out)
			}
		},
	})
	for key, n := range s.replays {
		if n != 1 {
			b.Errorf("%s was sent %d times", key, n)
		}
	}
}

// replayOnThePage kills one of two relays, which serves the page and sends, and continues at
// another one once the operation counts as killed. What the killed relay had sent and not settled
// is sent again.
func replayOnThePage(b *testing.B) {
	b.Helper()
	s := newReplayStage(b)
	const listen = "OUTBOX_ADMIN_LISTEN=127.0.0.1:0"
	server := s.launch(listen)
	client := server.console(s)
	body := ""
	s.measure(replayWay{
		preview: func() {
			_, body = client.send("GET", "/operations/new?action=replay&status=failed&destination=default", nil)
			if !strings.Contains(strings.ReplaceAll(body, "\u202f", ""), fmt.Sprintf("Replay %d deliveries?", s.events)) || !strings.Contains(body, "spread over about") {
				b.Error(body)
			}
		},
		order: func() {
			if status, body := client.send("POST", "/operations", confirmation(body)); status != 200 {
				b.Fatal(status, body)
			}
		},
		kill: func() { server.kill(s) },
		prepare: func() {
			server = s.launch(listen)
			client = server.console(s)
			if testing.Short() {
				s.db.RewriteAudit(`updated_at = now() - interval '1 minute'`)
			}
			relaytest.Eventually(s, "the operation counts as killed", func() bool {
				_, body := client.send("GET", "/operations/1", nil)
				return strings.Contains(body, "probably killed")
			})
		},
		goOn: func() {
			if status, body := client.send("POST", "/operations/1/resume", nil); status != 200 {
				b.Fatal(status, body)
			}
		},
	})
	server.stop(s)
	if got := relaytest.Row[string](s.db, `SELECT string_agg(concat_ws(' ', split_part(actor, '@', 1), origin, action, state, done), ', ' ORDER BY id) FROM outbox_audit`); got != fmt.Sprintf("ann page replay done %d, ann page resume_operation done 0", s.events) {
		b.Errorf("the audit has %s", got)
	}
	for key, n := range s.replays {
		if n > 2 {
			b.Errorf("%s was sent %d times", key, n)
		}
	}
}
