package charttest

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

var program string // built by TestMain

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "charttest")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	program = filepath.Join(dir, "outbox-relay")
	build := exec.Command("go", "build", "-buildvcs=false", "-C", "../../..", "-o", program, "./cmd/outbox-relay")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build outbox-relay: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// relay returns the program.
func relay(t *testing.T) string {
	t.Helper()
	return program
}

func newReader(text []byte) *bufio.Reader { return bufio.NewReader(bytes.NewReader(text)) }
