package config

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/cli"
)

// result is what one command left behind.
type result struct {
	code           int
	stdout, stderr string
}

// command runs a program that has the commands of this package alone.
func command(env []string, args ...string) result {
	var stdout, stderr bytes.Buffer
	program := cli.Program{
		Grammar: &struct {
			Config Command `cmd:""`
		}{},
		Env: env, Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr,
	}
	code := program.Run(args)
	return result{code, stdout.String(), stderr.String()}
}

func (r result) expect(t *testing.T, code int, stdout, stderr string) {
	t.Helper()
	if r.code != code || r.stdout != stdout || r.stderr != stderr {
		t.Errorf("got exit code %d, stdout:\n%s\nstderr:\n%s\nwant %d, stdout:\n%s\nstderr:\n%s", r.code, r.stdout, r.stderr, code, stdout, stderr)
	}
}

// writeFile makes a file that only its owner reads.
func writeFile(t *testing.T, name, content string) string {
	t.Helper()
	must(t, os.WriteFile(name, []byte(content), 0o600))
	return name
}

// must ends the test when err is not nil.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
