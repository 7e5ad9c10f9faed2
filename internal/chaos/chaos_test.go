package chaos

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

var (
	chaosTime = flag.Duration("chaos", 40*time.Second, "how long TestChaos makes faults")
	chaosSeed = flag.Uint64("seed", 0, "repeats the faults of a run that printed this seed; 0: a new one")
	oldRelay  = flag.String("old", "", "an outbox-relay of another version: every second process of a relay is one, as in an upgrade and its reversal")
	age       = flag.Int("age", 0, "how many times 430,000 deliveries the outbox of TestChaos holds before it begins, without statistics, while a snapshot blocks vacuum")
	relays    = flag.Int("relays", 3, "how many relays deliver in TestChaos")
	pooled    = flag.Int("pooler", 0, "how many of the relays, and of the receivers, reach their databases through a PgBouncer in transaction mode, which is killed too")
)

func TestMain(m *testing.M) {
	if os.Getenv(receiverDatabase) != "" {
		if err := receive(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	process.ClearEnvironment()
	pgtest.RunTests(m)
}

// Without faults, every event is one request.
func TestCalm(t *testing.T) {
	s := newStage(t, 1, 2)
	s.produceMeanwhile(1000, testsize.Of(2000, 300))()
	s.drained()
	figures := s.judge()
	if figures.Requests != figures.events || figures.events == 0 || figures.failures != 0 {
		t.Errorf("%d requests for %d events, and %d logged without success", figures.Requests, figures.events, figures.failures)
	}
}

// largeSales commits events of 1 MB each.
const largeSales = `
WITH large AS (INSERT INTO sales SELECT 'large-' || i FROM generate_series(1, $1) i RETURNING key)
INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'sale.made', json_build_object('key', key, 'note', repeat('x', 1000000)), key FROM large`

// A relay that may open fewer files than it wants connections, and has little memory, is slow, and
// no event loses an attempt to a connection that it could not open. With more memory than it may
// have, it would die.
func TestCrampedRelay(t *testing.T) {
	s := newStage(t, 1, 0)
	s.limits = "ulimit -n 40; ulimit -d 262144; export GOMEMLIMIT=16MiB;" // of address space that may be written; it begins with 140 MiB
	s.openRelay("relay-1")
	ended := s.fault("relay-1", history.Delays)
	end := s.produceMeanwhile(4000, testsize.Of(2000, 400))
	_, err := s.outbox.Exec(s.Ctx, largeSales, testsize.Of(200, 30))
	s.must(err)
	end()
	s.drained()
	ended()
	s.judge()
	cramped := all(s, s.outbox, `SELECT count(*) FROM outbox_attempt WHERE error LIKE '%too many open files'`, pgx.RowTo[int])[0]
	spent := all(s, s.outbox, `SELECT concat_ws(' ', event_id, reason, error) FROM outbox_attempt WHERE outcome <> 'hold' AND reason NOT IN ('ok', 'timeout')`, pgx.RowTo[string])
	if cramped == 0 || len(spent) > 0 { // a megabyte may take longer than the timeout, where a busy machine clears so little memory again and again
		t.Errorf("%d connections found no descriptor; attempts were spent by: %q", cramped, spent)
	}
}

// While relays, receivers, the database and what connects them fail at random: no event is lost, no
// effect doubled, each key keeps its order, and each request that is more than one has a recorded
// cause.
func TestChaos(t *testing.T) {
	s := openStage(t, chosenSeed(t), false)
	if *age > 0 {
		s.makeOld()
	}
	s.endureFaults(testsize.Of(*chaosTime, min(*chaosTime, 15*time.Second)))
}

func chosenSeed(t *testing.T) uint64 {
	seed := *chaosSeed
	if seed == 0 {
		seed = rand.Uint64N(1_000_000)
	}
	t.Logf("repeat these faults with -seed %d", seed)
	return seed
}

// endureFaults makes faults at random while producers commit, waits until everything is delivered,
// and checks it. A receiver that records events is killed after each fault.
func (s *stage) endureFaults(lasts time.Duration) figures {
	s.t.Helper()
	rests := lasts >= 2*time.Minute // so that no fault is near many requests
	s.openRelays(*relays)
	s.wire.share.Store(1)
	ended := s.produceMeanwhile(200, 0)
	faults := slices.Clip(faults)
	if s.pooler != nil {
		faults = append(faults, poolerDies)
	}
	if s.record {
		faults = append(faults, receiversRestart)
	}
	begun := time.Now()
	for said := begun; time.Since(begun) < lasts && s.Ctx.Err() == nil; {
		pause := s.between(0, time.Second)
		if s.random.IntN(3) == 0 && rests {
			pause += 6 * time.Second
		}
		<-time.After(pause)
		s.makeFault(faults[s.random.IntN(len(faults))])
		if s.record {
			s.makeFault(receiverKilled)
		}
		if time.Since(said) > time.Minute {
			said = time.Now()
			s.t.Logf("%s: %v", time.Since(begun).Round(time.Second), s.made)
		}
	}
	s.must(s.Ctx.Err())
	s.wire.share.Store(0)
	ended()
	s.drained()
	if *age > 0 && !s.record {
		s.agedWell()
	}
	s.afterwards()
	f := s.judge()
	s.wantFaultsToMatter(f, lasts, rests)
	return f
}

func (s *stage) makeFault(f fault) {
	s.making = f.name
	f.make(s)
	s.made[f.name]++
}

// wantFaultsToMatter fails the test if its faults did nothing, or excuse too much.
func (s *stage) wantFaultsToMatter(figures figures, lasts time.Duration, rests bool) {
	s.t.Helper()
	s.t.Logf("seed %d, %s, %d relays: %s; %s; of these, answers lost, rows locked, tables altered: %v; the server's errors: %s", s.seed, lasts, *relays, figures, s.faultsMade(), s.did, s.serverErrors())
	if rests && figures.excused() > mostExcused {
		s.t.Errorf("a fault would excuse %.1f %% of the requests that were accepted, more than %d: that judges too few", figures.excused(), mostExcused)
	}
	if rests && figures.Overload > lasts/10 {
		s.t.Errorf("the machine had too much to do for %s: that excuses too much that comes late", figures.Overload)
	}
	for making, n := range s.did {
		if n == 0 && s.made[making] >= 10 {
			s.t.Errorf("%s, %d times, and nothing came of it", making, s.made[making])
		}
	}
	mayBatch := *relays > 1 && !s.record && !testing.Short()
	if figures.events == 0 || len(s.made) == 0 || figures.batched == 0 && mayBatch {
		s.t.Error("nothing was sent, or nothing went wrong")
	}
}

// produceMeanwhile lets producers commit until the returned function is called, or each has made
// its share of most.
func (s *stage) produceMeanwhile(perSecond float64, most int) (end func()) {
	ctx, cancel := context.WithCancel(s.Ctx)
	var producing, watching sync.WaitGroup
	for p := range producers {
		producing.Go(func() { s.produce(ctx, p+1, perSecond, most/producers) })
	}
	watching.Go(func() { s.watch(ctx) })
	end = sync.OnceFunc(func() {
		if most == 0 {
			cancel()
		}
		producing.Wait()
		cancel()
		watching.Wait()
		if s.compared == 0 {
			s.t.Error("effects and processed_events were never compared in one snapshot")
		}
	})
	s.t.Cleanup(func() { cancel(); end() })
	return end
}

func (s *stage) faultsMade() string {
	var made []string
	for _, name := range slices.Sorted(maps.Keys(s.made)) {
		made = append(made, fmt.Sprintf("%s %d", name, s.made[name]))
	}
	return strings.Join(made, ", ")
}

// serverErrors counts what the databases refused.
func (s *stage) serverErrors() string {
	log, counts := s.Server.LogTail(math.MaxInt), []string{}
	for _, what := range []string{"deadlock detected", "could not serialize access", "in a read-only transaction", "too many clients"} {
		counts = append(counts, fmt.Sprintf("%s %d", what, strings.Count(log, what)))
	}
	return fmt.Sprintf("%s; %d of the deadlocks ended no relay's statement", strings.Join(counts, ", "), s.deadlocked)
}

const mostExcused = 70 // measured: 26 to 49

// excused returns the share of the accepted requests that a fault would excuse, in percent.
func (f figures) excused() float64 { return 100 * float64(f.Excused) / float64(max(f.Accepted, 1)) }

type figures struct {
	history.Figures
	events, batched, failures, breaches int
}

func (f figures) String() string {
	return fmt.Sprintf("%d events, sent %d times, %d of them in batches and %d more than once, of these %d after they were accepted; %d without success; a fault would excuse %.1f %% of those that were accepted; "+
		"from commit to first request %s for 99 %%, at most %s; the last request %s after the last fault and commit; overloaded for %s; %d breaches",
		f.events, f.Requests, f.batched, f.More, f.Repeats, f.Refused, f.excused(),
		f.P99.Round(time.Millisecond), f.Longest.Round(time.Millisecond), f.Recovery.Round(time.Millisecond), f.Overload, f.breaches)
}

// judge fails the test with every breach of a promise, and keeps the history and the tables then.
func (s *stage) judge() figures {
	s.t.Helper()
	calls, tables := s.history.Calls(), s.tables()
	breaches := history.Check(calls, tables)
	f := figures{Figures: history.Measure(calls, tables), events: len(tables.Business), batched: int(s.wire.batched.Load()), failures: len(tables.Failures), breaches: len(breaches)}
	for i, b := range breaches {
		if i == 30 {
			s.t.Errorf("… and %d more", len(breaches)-i)
			break
		}
		s.t.Error(b)
	}
	if s.t.Failed() {
		s.keep(tables, breaches)
	}
	return f
}

// keep writes what a failure can be understood from into a directory that outlives the test.
func (s *stage) keep(tables history.Tables, breaches []history.Breach) {
	s.t.Helper()
	dir, err := os.MkdirTemp("", "outbox-relay-chaos-")
	testkit.Must(s.t, err)
	file, err := os.Create(filepath.Join(dir, "history.jsonl"))
	testkit.Must(s.t, err)
	defer file.Close()
	_, err = s.history.WriteTo(file)
	testkit.Must(s.t, err)
	for name, value := range map[string]any{"tables.json": tables, "breaches.json": breaches} {
		text, err := json.MarshalIndent(value, "", " ")
		testkit.Must(s.t, err)
		testkit.Must(s.t, os.WriteFile(filepath.Join(dir, name), text, 0o600))
	}
	testkit.Must(s.t, os.CopyFS(filepath.Join(dir, "relays"), os.DirFS(s.logs)))
	testkit.Must(s.t, os.WriteFile(filepath.Join(dir, "postgres.log"), []byte(s.Server.LogTail(math.MaxInt)), 0o600))
	s.t.Logf("the history and the tables are kept in %s (seed %d)", dir, s.seed)
}
