package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// asProgram makes the test binary be the program, so that it can start itself in its roles.
const asProgram = "BENCH_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" || len(os.Args) > 1 && os.Args[1] == "role" {
		main()
		os.Exit(0)
	}
	code := m.Run()
	if dir, err := builtRelay(); err == nil {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

// builtRelay builds the program once for all tests, and returns its directory.
var builtRelay = sync.OnceValues(func() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "outbox-relay-built-"); err != nil {
		return "", err
	}
	if out, err := exec.Command("go", "build", "-C", "../..", "-o", filepath.Join(dir, "outbox-relay"), "./cmd/outbox-relay").CombinedOutput(); err != nil {
		return "", fmt.Errorf("build outbox-relay: %w\n%s", err, out)
	}
	return dir, nil
})

func buildRelay(t *testing.T) string {
	t.Helper()
	dir, err := builtRelay()
	testkit.Must(t, err)
	return filepath.Join(dir, "outbox-relay")
}

// Every system delivers every event, and the page gets the table.
func TestQuick(t *testing.T) {
	t.Parallel()
	docs := t.TempDir()
	page := filepath.Join(docs, "performance.md")
	original, err := os.ReadFile("../../docs/performance.md")
	testkit.Must(t, err)
	testkit.Must(t, os.WriteFile(page, original, 0o600))
	testkit.Must(t, run(t.Context(), []string{"-quick", "-run", "drain,pipelined", "-relay", buildRelay(t), "-docs", docs}))
	changed, err := os.ReadFile(page)
	testkit.Must(t, err)
	for _, system := range []string{nameOurs, nameTuned, nameRiver, nameTextbook, nameLoop, nameUnsigned, nameBare} {
		if !strings.Contains(string(changed), "| "+system+" |") {
			t.Errorf("the page has no row of %s", system)
		}
	}
}

// Two builds are measured in turns, and nothing else is. A part of a workload is never published.
func TestChosenParts(t *testing.T) {
	t.Parallel()
	relay := buildRelay(t)
	all := workloads(options{events: 10, seconds: 1})
	for _, c := range []struct {
		o       options
		systems []string
		cases   int
	}{
		{options{run: "drain", alone: true}, []string{nameOurs}, 4},
		{options{run: "drain", beside: relay}, []string{nameOurs, nameOther}, 4},
		{options{run: "drain", beside: relay, cases: "^1 destination, answers after 0s$"}, []string{nameOurs, nameOther}, 1},
	} {
		chosen, err := chosenBy(c.o, all)
		testkit.Must(t, err)
		if len(chosen) != 1 || len(chosen[0].cases) != c.cases {
			t.Fatalf("%+v chooses %d workloads, the first with %d cases", c.o, len(chosen), len(chosen[0].cases))
		}
		var systems []string
		for _, e := range chosen[0].cases[0].entrants {
			systems = append(systems, e.system)
		}
		if !slices.Equal(systems, c.systems) {
			t.Errorf("%+v measures %q, want %q", c.o, systems, c.systems)
		}
	}
	if n := len(all[0].cases[0].entrants); n < 4 {
		t.Errorf("choosing has left %d systems in the workload itself", n)
	}
	for _, o := range []options{
		{run: "drain", cases: "there is none"},
		{run: "drain", cases: "("},
		{run: "drain", beside: "missing"},
		{run: "drain", alone: true, docs: "docs"},
		{run: "drain", beside: relay, docs: "docs"},
		{run: "drain", cases: "1", docs: "docs"},
	} {
		if _, err := chosenBy(o, all); err == nil {
			t.Errorf("%+v is accepted", o)
		}
	}
}

// The ratio of two builds stands in the table, of every metric.
func TestBesideAnotherBuild(t *testing.T) {
	t.Parallel()
	relay := buildRelay(t)
	o := options{rounds: 1, quick: true, events: 100, seconds: 1, relay: relay, beside: relay, run: "drain"}
	chosen, err := chosenBy(o, workloads(o))
	testkit.Must(t, err)
	r, err := newRig(t.Context(), o)
	testkit.Must(t, err)
	defer r.close()
	found, err := r.run(t.Context(), chosen[0])
	testkit.Must(t, err)
	for _, heading := range []string{"events/s: beside the other", "its CPU, µs an event: beside the other"} {
		if table := markdown(chosen[0], found, o); !strings.Contains(table, heading) {
			t.Errorf("the table has no column %q:\n%s", heading, table)
		}
	}
}

// An interrupt ends every process that the program started, and the server with its directory.
func TestInterruptLeavesNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-run", "ordered", "-rounds", "1", "-events", "2000000", "-relay", buildRelay(t))
	cmd.Env = append(os.Environ(), asProgram+"=1", "TMPDIR="+dir)
	out, err := cmd.StdoutPipe()
	testkit.Must(t, err)
	testkit.Must(t, cmd.Start())
	// The first line describes the machine, once server and receiver run.
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	if left := mentioning(t, dir, cmd.Process.Pid); len(left) == 0 {
		t.Fatal("no process runs that could be left behind")
	}
	testkit.Must(t, cmd.Process.Signal(syscall.SIGINT))
	exit := new(exec.ExitError)
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("the program ended with %v, want exit code 1", err)
	}
	for _, process := range mentioning(t, dir, cmd.Process.Pid) {
		t.Errorf("%s is left behind", process)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("files are left behind: %v, %v", entries, err)
	}
}

// mentioning lists the processes, other than the program, whose environment names its directory.
func mentioning(t *testing.T, dir string, program int) (found []string) {
	t.Helper()
	processes, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil || len(processes) == 0 {
		t.Skip("this system has no /proc")
	}
	for _, file := range processes {
		environment, _ := os.ReadFile(file) // gone by now
		if bytes.Contains(environment, []byte("TMPDIR="+dir)) && file != "/proc/"+strconv.Itoa(program)+"/environ" {
			found = append(found, file)
		}
	}
	return found
}

func TestPageHasAPlaceForEachWorkload(t *testing.T) {
	t.Parallel()
	for _, w := range workloads(options{events: 10, settled: 10, seconds: 1}) {
		if err := hasPlace("../../docs", w); err != nil {
			t.Error(err)
		}
	}
}

func TestBetween(t *testing.T) {
	t.Parallel()
	got, err := between("a\n<!-- bench x -->\nold\n<!-- end x -->\nb\n", "x", "new\n")
	if want := "a\n<!-- bench x -->\nnew\n<!-- end x -->\nb\n"; err != nil || got != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	for _, page := range []string{"", "<!-- bench x -->\n", "<!-- end x -->"} {
		if _, err := between(page, "x", ""); err == nil {
			t.Errorf("%q has no place, but was accepted", page)
		}
	}
}

func TestNumbers(t *testing.T) {
	t.Parallel()
	for want, value := range map[string]float64{"0": 0, "999": 999, "1,000": 1000, "-1,234,568": -1234567.8} {
		if got := number(value, 0); got != want {
			t.Errorf("number(%v) = %q, want %q", value, got, want)
		}
	}
	for want, values := range map[string][]float64{"": nil, "2.0": {2}, "2.5 (1.0–4.0)": {4, 1, 3, 2}, "1.0": {1, 1}} {
		if got := spread(values, 1); got != want {
			t.Errorf("spread(%v) = %q, want %q", values, got, want)
		}
	}
}

// A ratio divides what was measured in one round, so that a slow round of both does not count.
func TestRatiosAreByRound(t *testing.T) {
	t.Parallel()
	at, base := place{"c", "a"}, place{"c", "b"}
	all := results{at: {{"rate": 10}, {"rate": 100}}, base: {{"rate": 20}, {"rate": 200}}}
	if got := all.ratios(at, ratio{metric: "rate", toSystem: "b"}); !slices.Equal(got, []float64{0.5, 0.5}) {
		t.Errorf("ratios are %v, want 0.5 twice", got)
	}
	if got := all.ratios(base, ratio{metric: "rate", toSystem: "b"}); got != nil {
		t.Errorf("a system beside itself has the ratios %v", got)
	}
}

func TestReceiverReadsRequests(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]int{`{"n":12,"pad":"x"}`: 12, `{"d": 0, "n": 7, "pad": "x"}`: 7, `{}`: -1, `{"n":"x"}`: -1} {
		if got := eventNumber([]byte(body)); got != want {
			t.Errorf("eventNumber(%s) = %d, want %d", body, got, want)
		}
	}
	in := bufio.NewReader(strings.NewReader("POST /10000/d7 HTTP/1.1\r\nHost: x\r\ncontent-length: 3\r\n\r\nabc"))
	delay, length, err := readHead(in)
	if delay != 10*time.Millisecond || length != 3 || err != nil {
		t.Errorf("delay %s, length %d, %v; want 10ms, 3", delay, length, err)
	}
	tally := newTally(10)
	for n := range 10 {
		tally.add(n, time.Unix(int64(n+1), 0))
		tally.add(n, time.Unix(100, 0))
	}
	tally.add(-1, time.Now())
	a := tally.report(true)
	if a.Distinct != 10 || a.Requests != 20 || a.Tenths[0] != 1e9 || a.Tenths[10] != 10e9 || a.At[4] != 5e9 {
		t.Errorf("the tally is %+v", a)
	}
}

// A link passes on what it is given, in its order.
func TestLink(t *testing.T) {
	t.Parallel()
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	testkit.Must(t, err)
	defer echo.Close()
	go func() {
		for {
			conn, err := echo.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	l, err := startLink(context.WithoutCancel(t.Context()), echo.Addr().String(), time.Millisecond)
	testkit.Must(t, err)
	defer l.close()
	conn, err := net.Dial("tcp", l.addr())
	testkit.Must(t, err)
	sent := bytes.Repeat([]byte("0123456789"), 20_000)
	go func() {
		_, _ = conn.Write(sent)
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("what came back differs, or %v", err)
	}
	conn.Close()
}

// What an event costs in WAL hardly depends on how busy the machine is. The limit of the insert is
// a fifth above what was measured, that of the drain is higher: a delivery that waits for longer
// than a second is written as pending first.
func TestWALOfAnEvent(t *testing.T) {
	t.Parallel()
	r, err := newRig(t.Context(), options{relay: buildRelay(t)})
	testkit.Must(t, err)
	defer r.close()
	drained, err := r.drain(t.Context(), ours{}, load{events: 5000})
	testkit.Must(t, err)
	inserted, err := r.pipelined(t.Context(), ours{}, insertOutbox)
	testkit.Must(t, err)
	t.Logf("WAL: %.0f B of a drained event, %.0f B of an insert", drained["wal"], inserted["wal"])
	if got := drained["wal"]; got <= 0 || got > 500 {
		t.Errorf("take and settle write %.0f B an event, want at most 500", got)
	}
	if got := inserted["wal"]; got <= 0 || got > 790 {
		t.Errorf("an insert writes %.0f B, want at most 790", got)
	}
}
