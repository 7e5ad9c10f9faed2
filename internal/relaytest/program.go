package relaytest

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A Program is the outbox-relay that make builds, with a configuration file. Its commands are real
// processes.
type Program struct {
	testing.TB
	path, config string
	env          []string
}

// NewProgram returns the program at the given path, which works on db.
func NewProgram(db *Database, path string) *Program {
	db.Helper()
	path, err := filepath.Abs(path)
	Must(db, err)
	if _, err := os.Stat(path); err != nil {
		db.Fatalf("make build first: %v", err)
	}
	p := &Program{TB: db.TB, path: path, config: filepath.Join(db.TempDir(), "outbox-relay.yaml")}
	p.env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "OUTBOX_") }),
		"OUTBOX_DATABASE_URL="+db.DSN, "OUTBOX_METRICS_LISTEN=none", "OUTBOX_ADMIN_LISTEN=none", "OUTBOX_DATABASE_ALLOW_SUPERUSER=true")
	return p
}

// Configure writes the configuration file.
func (p *Program) Configure(text string) {
	p.Helper()
	Must(p, os.WriteFile(p.config, []byte(text), 0o600))
}

// Command runs a command to its end.
func (p *Program) Command(args ...string) (code int, stdout, stderr string) {
	p.Helper()
	var out, errs strings.Builder
	cmd := p.command(args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		p.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func (p *Program) command(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(context.WithoutCancel(p.Context()), p.path, append(args, "--config", p.config)...)
	cmd.Env = p.env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C reaches the test, which ends it
	return cmd
}

// A Running is a relay in its own process.
type Running struct {
	testing.TB
	child *testkit.Child

	mu    sync.Mutex
	lines []LogLine
}

// A LogLine is what a relay has logged.
type LogLine struct {
	Destination string `json:"destination"`
	Error       string `json:"error"`
	Warning     string `json:"warning"`
	Message     string `json:"msg"`
}

// Run starts a relay, which is stopped in order at the end of the test, and must exit with 0 then.
func (p *Program) Run() *Running {
	p.Helper()
	r := &Running{TB: p.TB}
	cmd := p.command("run")
	var err error
	r.child, err = testkit.StartChild(cmd, cmd.StderrPipe, func(text string) {
		var line LogLine
		if json.Unmarshal([]byte(text), &line) != nil {
			line.Message = text
		}
		r.mu.Lock()
		r.lines = append(r.lines, line)
		r.mu.Unlock()
	})
	Must(p, err)
	p.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		<-r.child.Ended
		if r.child.Err != nil {
			p.Errorf("the relay ended with %v", r.child.Err)
		}
	})
	return r
}

// Reload makes the relay read its configuration again.
func (r *Running) Reload() { Must(r, r.child.Cmd.Process.Signal(syscall.SIGHUP)) }

// Logs waits for a line about a destination with a message, and with an error or a warning that
// contains a text.
func (r *Running) Logs(destination, message, text string) {
	r.Helper()
	seen, found := "", false
	defer func() {
		if !found {
			r.Logf("%s: want %q, the log says\n%s", destination, text, seen)
		}
	}()
	Eventually(r, "a line about "+destination, func() bool {
		select {
		case <-r.child.Ended:
			r.Fatalf("the relay has ended: %+v", r.lines)
		default:
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		seen = ""
		for _, line := range r.lines {
			if line.Destination == destination {
				seen += fmt.Sprintf("%+v\n", line)
				found = found || line.Message == message && strings.Contains(line.Error+line.Warning, text)
			}
		}
		return found
	})
}
