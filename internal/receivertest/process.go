package receivertest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// The environment by which a test makes the test binary play one process of a receiver.
const (
	roleName = "OUTBOX_TEST_ROLE"
	roleDSN  = "OUTBOX_TEST_DSN" // of the database that the process works on
)

// RunTests is the body of a TestMain whose test binary can play the given roles: processes that a
// test starts, and may kill. Each writes lines to its standard output for its test to read.
func RunTests(m *testing.M, roles map[string]func(p *Player)) {
	if name := os.Getenv(roleName); name != "" {
		play(name, roles[name])
		return
	}
	pgtest.RunTests(m)
}

// Player is the process of a role, seen from inside.
type Player struct {
	DSN    string
	Orders chan string // the lines that the test writes
}

// play makes this process be a role. It ends with the test's process, however that one ends.
func play(name string, role func(p *Player)) {
	if role == nil {
		panic(fmt.Sprintf("there is no role %q", name))
	}
	p := &Player{DSN: os.Getenv(roleDSN), Orders: make(chan string)}
	go func() {
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			p.Orders <- lines.Text()
		}
		panic("the process of the test has ended")
	}()
	role(p)
}

// Pool opens the role's connections.
func (p *Player) Pool() *pgxpool.Pool {
	pool, err := pgxpool.New(context.Background(), p.DSN)
	if err != nil {
		panic(err)
	}
	return pool
}

// Listen opens a socket for the role.
func (p *Player) Listen() (listener net.Listener, url string) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	return listener, "http://" + listener.Addr().String()
}

// Serve says where the role listens, as its first line, and serves.
func (p *Player) Serve(handler http.Handler) {
	listener, url := p.Listen()
	fmt.Println(url)
	panic(http.Serve(listener, handler))
}

// Process is a role, seen from its test.
type Process struct {
	*testkit.Child
	stdin io.WriteCloser

	mu    sync.Mutex // guards stdin once the process runs
	Lines chan string
}

// Launch starts a process of this role; each gets its lines. settings are further entries of its
// environment.
func Launch(ctx context.Context, role, dsn string, each func(line string), settings ...string) (*Process, error) {
	binary, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the test binary: %w", err)
	}
	cmd := exec.CommandContext(ctx, binary)
	cmd.Env = append(os.Environ(), append(settings, roleName+"="+role, roleDSN+"="+dsn)...)
	cmd.Stderr = os.Stderr
	p := &Process{}
	if p.stdin, err = cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("open pipe: %w", err)
	}
	if p.Child, err = testkit.StartChild(cmd, cmd.StdoutPipe, each); err != nil {
		return nil, fmt.Errorf("start role %s: %w", role, err)
	}
	return p, nil
}

// LaunchFor starts a process that ends with t, whose lines are read with [Process.Line].
func LaunchFor(t testing.TB, role, dsn string, settings ...string) *Process {
	t.Helper()
	lines := make(chan string, 1000)
	p, err := Launch(t.Context(), role, dsn, func(line string) { lines <- line }, settings...)
	pgtest.Must(t, err)
	p.Lines = lines
	t.Cleanup(p.Kill)
	return p
}

// Line returns the next line of the process; false when it has ended without one.
func (p *Process) Line() (string, bool) {
	select {
	case line := <-p.Lines:
		return line, true
	case <-p.Ended:
	}
	select {
	case line := <-p.Lines:
		return line, true
	default:
		return "", false
	}
}

// WantLine returns the next line of the process, which must not have ended.
func (p *Process) WantLine(t testing.TB) string {
	t.Helper()
	line, ok := p.Line()
	if !ok {
		t.Fatalf("the process ended with %v", p.Cmd.ProcessState)
	}
	return line
}

// Order gives the process a line. One that has ended takes none.
func (p *Process) Order(line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = io.WriteString(p.stdin, line+"\n")
}

// Signal sends a signal to the process, unless it has ended.
func (p *Process) Signal(s syscall.Signal) {
	if err := p.Cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		panic(err)
	}
}

// Kill ends the process with SIGKILL and returns when it is gone.
func (p *Process) Kill() {
	p.Signal(syscall.SIGKILL)
	<-p.Ended
}

// Killed reports of a process that is gone whether SIGKILL ended it.
func (p *Process) Killed() bool {
	return strings.Contains(p.Cmd.ProcessState.String(), "killed")
}
