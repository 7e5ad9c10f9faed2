package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/process"
)

// asDemo, in the environment, makes the tests' binary be the demo.
const asDemo = "DEMO_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asDemo) != "" || len(os.Args) > 1 && (os.Args[1] == financeName || os.Args[1] == logisticsName) {
		os.Exit(realMain(os.Args[1:]))
	}
	process.ClearEnvironment()
	pgtest.RunTests(m)
}

// relay is the outbox-relay that the tests run, built once.
var relay struct {
	once sync.Once
	path string
	err  error
}

// relayBinary returns the path of an outbox-relay built from the present sources.
func relayBinary(t *testing.T) string {
	t.Helper()
	relay.once.Do(func() {
		// Not in a directory for temporary files: a test run that is killed could not remove it.
		relay.path, relay.err = filepath.Abs("../../bin/outbox-relay-under-test")
		if relay.err != nil {
			return
		}
		if out, err := exec.Command("go", "build", "-buildvcs=false", "-o", relay.path, "../outbox-relay").CombinedOutput(); err != nil {
			relay.err = fmt.Errorf("build outbox-relay: %w\n%s", err, out)
		}
	})
	if relay.err != nil {
		t.Fatal(relay.err)
	}
	return relay.path
}

// seed of every test's faults. A failure is repeated with the same one, though not with the same
// timing.
const seed = 4711

// newStage opens a stage that is closed when t ends.
func newStage(t *testing.T) *stage {
	t.Helper()
	s, err := openStage(t.Context(), relayBinary(t), seed)
	pgtest.Must(t, err)
	t.Cleanup(func() {
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// try fails the test on an error of a step. If the play has ended for a reason, that is the error.
func (s *stage) try(t *testing.T, err error) {
	t.Helper()
	pgtest.Must(t, s.Reason(err))
}

// enter starts the receiver and n relays.
func (s *stage) enter(t *testing.T, n int, f faults, settings ...string) (relays []*process.Unit) {
	t.Helper()
	s.try(t, s.openReceiver(f))
	for i := range n {
		u, err := s.openRelay(fmt.Sprintf("relay-%d", i+1), settings...)
		s.try(t, err)
		relays = append(relays, u)
	}
	return relays
}

// settle waits until all is delivered and returns the figures, after checking that every promise
// was kept.
func (s *stage) settle(t *testing.T) figures {
	t.Helper()
	s.try(t, s.drained(drainPatience))
	s.network.calm.Store(true)
	s.try(t, s.gather())
	n, rules, err := check(t.Context(), s.finance)
	s.try(t, err)
	for _, r := range rules {
		for i, breach := range r.broken {
			if i == 20 {
				t.Errorf("%s: … and %d more", r.promise, len(r.broken)-i)
				break
			}
			t.Errorf("%s: %s", r.promise, breach)
		}
	}
	return n
}

// value returns the only value of a query over the facts.
func value[T any](t *testing.T, s *stage, query string) T {
	t.Helper()
	v, err := process.One[T](t.Context(), s.finance, query)
	s.try(t, err)
	return v
}

// processes lists the commands that name any of the words.
func processes(t *testing.T, words ...string) (found []string) {
	t.Helper()
	var commands []string
	if paths, _ := filepath.Glob("/proc/[0-9]*/cmdline"); len(paths) > 0 {
		for _, path := range paths {
			args, _ := os.ReadFile(path) // empty once the process has gone
			commands = append(commands, strings.ReplaceAll(string(args), "\x00", " "))
		}
	} else {
		out, err := exec.Command("ps", "-axww", "-o", "args=").Output()
		if err != nil {
			t.Fatalf("list processes: %v", err)
		}
		commands = strings.Split(string(out), "\n")
	}
	for _, command := range commands {
		if slices.ContainsFunc(words, func(word string) bool { return strings.Contains(command, word) }) {
			found = append(found, command)
		}
	}
	return found
}
