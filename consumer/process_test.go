package consumer_test

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
)

// The environment by which a test makes the test binary play one process of a receiver.
const (
	roleName = "OUTBOX_TEST_ROLE"
	roleDSN  = "OUTBOX_TEST_DSN" // of the database that the process works on
)

// roles are the processes that the test binary can be. Each writes lines to its standard output for its test to read.
func roles() map[string]func(p *player) {
	return map[string]func(p *player){
		"hang":      receiveAndHang,
		"receive":   receive,
		"die":       receiveAndDie,
		"work-die":  workAndDie,
		"prune-die": pruneAndDie,
		"record":    recordOnly,
		"work":      recordAndWork,
		"stall":     stallOnOrder,
	}
}

// player is the process of a role, seen from inside.
type player struct {
	dsn    string
	orders chan string // the lines that the test writes
}

// play makes this process be a role. It ends with the test's process, however that one ends.
func play(name string) {
	role, ok := roles()[name]
	if !ok {
		fmt.Fprintf(os.Stderr, "there is no role %q\n", name)
		os.Exit(2)
	}
	p := &player{dsn: os.Getenv(roleDSN), orders: make(chan string)}
	go func() {
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			p.orders <- lines.Text()
		}
		os.Exit(3) // the test has gone
	}()
	role(p)
}

// pool opens the role's connections.
func (p *player) pool() *pgxpool.Pool {
	pool, err := pgxpool.New(context.Background(), p.dsn)
	if err != nil {
		panic(err)
	}
	return pool
}

// listen opens a socket for the role.
func (p *player) listen() (listener net.Listener, url string) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	return listener, "http://" + listener.Addr().String()
}

// serve says where the role listens, as its first line, and serves.
func (p *player) serve(handler http.Handler) {
	listener, url := p.listen()
	fmt.Println(url)
	panic(http.Serve(listener, handler))
}

// process is a role, seen from its test.
type process struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	ended chan struct{} // closed when the process is gone and all its lines have been passed on

	mu    sync.Mutex // guards stdin once the process runs
	lines chan string
}

// launch starts a process of this role; each gets its lines. settings are further entries of its environment.
func launch(ctx context.Context, role, dsn string, each func(line string), settings ...string) (*process, error) {
	binary, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the test binary: %w", err)
	}
	p := &process{cmd: exec.CommandContext(ctx, binary), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), append(settings, roleName+"="+role, roleDSN+"="+dsn)...)
	p.cmd.Stderr = os.Stderr
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("open pipe: %w", err)
	}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("open pipe: %w", err)
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start role %s: %w", role, err)
	}
	go func() {
		defer close(p.ended)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			each(lines.Text())
		}
		_ = p.cmd.Wait() // how it ended is asked for when it matters
	}()
	return p, nil
}

// launchFor starts a process that ends with t, whose lines are read with [process.line].
func launchFor(t testing.TB, role, dsn string, settings ...string) *process {
	t.Helper()
	lines := make(chan string, 1000)
	p, err := launch(t.Context(), role, dsn, func(line string) { lines <- line }, settings...)
	if err != nil {
		t.Fatal(err)
	}
	p.lines = lines
	t.Cleanup(p.kill)
	return p
}

// line returns the next line of the process; false when it has ended without one.
func (p *process) line() (string, bool) {
	select {
	case line := <-p.lines:
		return line, true
	case <-p.ended:
	}
	select {
	case line := <-p.lines:
		return line, true
	default:
		return "", false
	}
}

// wantLine returns the next line of the process, which must not have ended.
func (p *process) wantLine(t testing.TB) string {
	t.Helper()
	line, ok := p.line()
	if !ok {
		t.Fatalf("the process ended with %v", p.cmd.ProcessState)
	}
	return line
}

// order gives the process a line. One that has ended takes none.
func (p *process) order(line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = io.WriteString(p.stdin, line+"\n")
}

// signal sends a signal to the process, unless it has ended.
func (p *process) signal(s syscall.Signal) {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		panic(err)
	}
}

// kill ends the process with SIGKILL and returns when it is gone.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.ended
}

// killed reports of a process that is gone whether SIGKILL ended it.
func (p *process) killed() bool {
	return strings.Contains(p.cmd.ProcessState.String(), "killed")
}
