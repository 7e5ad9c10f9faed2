package inbox_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// chaosStage is a database with the processes of a receiver that work on it.
type chaosStage struct {
	t    *testing.T
	dsn  string
	pool *pgxpool.Pool
	cast []*member

	units   sync.WaitGroup
	closing atomic.Bool     // no member begins another life
	ctx     context.Context // ends the cast
	end     context.CancelCauseFunc

	mu      sync.Mutex // guards the journal
	runs    map[string][]run
	open    map[string]int       // runs of a life that began and have no outcome yet
	kills   map[string]time.Time // lives that were killed
	stopped int                  // lives that ended in order
	errs    []string             // of attempts whose handler did not fail by itself
	changed chan struct{}        // closed at the next entry; nil: no goroutine waits
}

// member is a part of the cast that is always filled: when its process is gone, its next life
// begins.
type member struct {
	name, role string

	mu      sync.Mutex
	life    string // "worker-1.3" is the third
	number  int
	process *receivertest.Process
	url     string // where it listens; empty: it does not
}

func newChaosStage(t *testing.T, workers int) *chaosStage {
	t.Helper()
	s := &chaosStage{t: t, dsn: pgtest.New(t, migrations.Inbox), runs: map[string][]run{}, open: map[string]int{}, kills: map[string]time.Time{}}
	s.pool = pgtest.Pool(t, receivertest.WithSetting(s.dsn, "pool_max_conns", "8"))
	pgtest.Exec(t, s.pool, chaosSchema+";"+neighboursSchema)
	s.ctx, s.end = context.WithCancelCause(t.Context())
	t.Cleanup(func() {
		s.end(nil)
		s.units.Wait()
	})
	s.fill("recorder", "record")
	for i := range workers {
		s.fill(fmt.Sprintf("worker-%d", i+1), "work")
	}
	for _, m := range s.cast {
		s.await(m.name+" to listen", func() bool { return m.address() != "" })
	}
	return s
}

// fill adds a member to the cast.
func (s *chaosStage) fill(name, role string) {
	m := &member{name: name, role: role}
	s.cast = append(s.cast, m)
	s.units.Go(func() {
		for s.ctx.Err() == nil {
			p, err := s.begin(m)
			if err != nil {
				s.end(err)
			}
			if p == nil {
				return
			}
			<-p.Ended
			m.mu.Lock()
			m.url = ""
			life := m.life
			m.mu.Unlock()
			if state := p.Cmd.ProcessState; s.ctx.Err() == nil && !p.Killed() && !state.Success() {
				s.end(fmt.Errorf("%s ended by itself: %v", life, state))
			}
		}
	})
}

// begin starts the next life of a member, unless the cast is being told to stop.
func (s *chaosStage) begin(m *member) (*receivertest.Process, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s.closing.Load() {
		return nil, nil
	}
	m.number++
	life := fmt.Sprintf("%s.%d", m.name, m.number)
	listen := func(line string) {
		var e entry
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			s.end(fmt.Errorf("%s wrote %q: %w", life, line, err))
			return
		}
		if e.Op == opReady {
			m.mu.Lock()
			m.url = e.URL
			m.mu.Unlock()
		}
		s.add(life, e)
	}
	p, err := receivertest.Launch(s.ctx, m.role, receivertest.WithSetting(s.dsn, "pool_max_conns", "12"), listen, inboxLife+"="+life)
	if err != nil {
		return nil, err
	}
	m.life, m.process = life, p
	return p, nil
}

func (m *member) address() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.url
}

// add takes an entry of a journal.
func (s *chaosStage) add(life string, e entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch e.Op {
	case opBegan:
		s.runs[e.Key] = append(s.runs[e.Key], run{life: life, began: e.At})
		s.open[life]++
	case opFinished:
		s.open[life]--
		runs := s.runs[e.Key]
		for i := range runs {
			if runs[i].life == life && runs[i].outcome == "" {
				runs[i].outcome = e.Outcome
				break
			}
		}
		if e.Outcome == "commit_failed" {
			s.errs = append(s.errs, life+": "+e.Key+": "+e.Err)
		}
	case opStopped:
		s.stopped++
	}
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// kill ends a member's present life with SIGKILL.
func (s *chaosStage) kill(m *member) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s.mu.Lock()
	s.kills[m.life] = time.Now()
	s.mu.Unlock()
	m.url = ""
	m.process.Signal(syscall.SIGKILL)
}

// inRun reports whether a handler runs in a member's present life.
func (s *chaosStage) inRun(m *member) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	_, killed := s.kills[m.life]
	return !killed && s.open[m.life] > 0
}

// retire ends a member's present life in order.
func (s *chaosStage) retire(m *member) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.url = ""
	m.process.Order("stop")
}

// freeze keeps a member from doing anything for a while; it does not know of that.
func (s *chaosStage) freeze(m *member, pause time.Duration) {
	m.mu.Lock()
	p := m.process
	m.mu.Unlock()
	p.Signal(syscall.SIGSTOP)
	select {
	case <-time.After(pause):
	case <-s.ctx.Done():
	}
	p.Signal(syscall.SIGCONT)
}

// anyone returns the address of some member that listens; "" if none does.
func (s *chaosStage) anyone() string {
	for _, i := range rand.Perm(len(s.cast)) {
		if url := s.cast[i].address(); url != "" {
			return url
		}
	}
	return ""
}

// await waits for what entries of the journal bring about.
func (s *chaosStage) await(what string, done func() bool) {
	s.t.Helper()
	ctx, cancel := context.WithTimeoutCause(s.ctx, receivertest.Patience, fmt.Errorf("still waiting for %s", what))
	defer cancel()
	for {
		s.mu.Lock()
		if s.changed == nil {
			s.changed = make(chan struct{})
		}
		changed := s.changed
		s.mu.Unlock()
		if done() {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			s.t.Fatal(context.Cause(ctx))
		}
	}
}

// awaitRow polls the database until query is true.
func (s *chaosStage) awaitRow(patience, every time.Duration, what, query string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeoutCause(s.ctx, patience, fmt.Errorf("still waiting for %s", what))
	defer cancel()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		var yes bool
		err := s.pool.QueryRow(ctx, query).Scan(&yes)
		switch {
		case ctx.Err() != nil:
			s.t.Fatalf("%v\n%s", context.Cause(ctx), s.unfinished())
		case err != nil:
			s.t.Fatal(err)
		case yes:
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// unfinished shows some events that are not done, to find out why.
func (s *chaosStage) unfinished() string {
	rows, err := s.pool.Query(context.Background(), `SELECT p::text FROM (
		SELECT idempotency_key, processing_state, attempts, claim, claimed_by, claimed_at, next_attempt_at, ordering_key, sequence, inbox_id, last_error
		FROM inbox_events WHERE processing_state IN ('pending', 'processing') ORDER BY inbox_id LIMIT 20) p`)
	if err != nil {
		return err.Error()
	}
	defer rows.Close()
	var all strings.Builder
	for rows.Next() {
		var row string
		if err := rows.Scan(&row); err != nil {
			return err.Error()
		}
		all.WriteString(row + "\n")
	}
	return all.String()
}

// stop ends the whole cast in order. Everything that it has done is in the journal then.
func (s *chaosStage) stop() {
	s.t.Helper()
	s.closing.Store(true)
	for _, m := range s.cast {
		s.retire(m)
	}
	s.units.Wait()
	pgtest.Must(s.t, context.Cause(s.ctx))
}
