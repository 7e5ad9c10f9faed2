//go:build unix

package localpg

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// owner is a process that owns a server.
type owner struct {
	cmd   *exec.Cmd
	input io.Closer
	dir   string
}

// newOwner starts an owner in its own process group, as a shell would, and
// returns once it has named its directory.
func newOwner(t *testing.T, stage, binary string, account *syscall.Credential) *owner {
	t.Helper()
	cmd := exec.Command(binary)
	cmd.Dir = "/"
	cmd.Env = []string{ownerStage + "=" + stage, "PATH=" + os.Getenv("PATH")} // no HOME: a service account has none
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: account}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	input, err := cmd.StdinPipe()
	testkit.Must(t, err)
	output, err := cmd.StdoutPipe()
	testkit.Must(t, err)
	testkit.Must(t, cmd.Start())
	line, err := bufio.NewReader(output).ReadString('\n')
	if err != nil {
		cmd.Wait()
		t.Fatalf("the owner did not start: %v: %s", err, &stderr)
	}
	return &owner{cmd: cmd, input: input, dir: strings.TrimSpace(line)}
}

func (o *owner) kill(t *testing.T) {
	t.Helper()
	testkit.Must(t, o.cmd.Process.Kill())
}

func (o *owner) interruptGroup(t *testing.T) {
	t.Helper()
	testkit.Must(t, syscall.Kill(-o.cmd.Process.Pid, syscall.SIGINT))
}

func TestNothingOutlivesTheOwner(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	accounts := map[string]*syscall.Credential{"as this user": nil}
	binary, err := os.Executable()
	testkit.Must(t, err)
	if os.Geteuid() == 0 {
		accounts["as nobody"] = &syscall.Credential{Uid: 65534, Gid: 65534}
		binary = copyForEveryone(t, binary)
	}
	cases := []struct {
		name, stage string
		end         func(*owner, *testing.T)
	}{
		{"stopped", "stop", nil},
		{"exits without stopping", "exit", nil},
		{"killed", "run", (*owner).kill},
		{"interrupted with its group", "run", (*owner).interruptGroup},
		{"killed before initdb", "janitor", nil},
		{"killed during initdb", "init", nil},
		{"killed while PostgreSQL starts", "launch", nil},
	}
	for name, account := range accounts {
		for _, c := range cases {
			t.Run(name+"/"+c.name, func(t *testing.T) {
				t.Parallel()
				o := newOwner(t, c.stage, binary, account)
				if c.end != nil {
					if len(processes(t, o.dir)) == 0 {
						t.Error("no process names the directory: the test cannot tell when they are gone")
					}
					c.end(o, t)
				}
				if err := o.cmd.Wait(); c.stage == "stop" && err != nil {
					t.Errorf("the owner failed: %v", err)
				}
				wantNothingLeft(t, o.dir)
			})
		}
	}
}

// copyForEveryone copies the test binary to where any account can run it: go
// test builds it in a directory that only its own account can enter.
func copyForEveryone(t *testing.T, binary string) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "localpg-test-")
	testkit.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	testkit.Must(t, os.Chmod(dir, 0o755))
	program, err := os.ReadFile(binary)
	testkit.Must(t, err)
	path := filepath.Join(dir, "owner")
	testkit.Must(t, os.WriteFile(path, program, 0o755))
	return path
}
