package archtest

import (
	"errors"
	"os/exec"
	"strings"
	"testing"
)

// The rule about coverage keeps the status of the tests, says what it finds last, and finds it.
func TestCoverageScript(t *testing.T) {
	t.Parallel()
	const name = "github.com/outbox-relay/outbox-relay/"
	for what, c := range map[string]struct {
		output string
		status int
		want   string // what is added to the output
		code   int
	}{
		"enough":            {"ok  \t" + name + "outbox\t1.2s\tcoverage: 70.0% of statements\n", 0, "", 0},
		"too little":        {"ok  \t" + name + "outbox\t(cached)\tcoverage: 69.9% of statements\n", 0, "coverage: outbox reaches 69.9 % from its own tests, not 70\nFAIL\n", 1},
		"no tests":          {"\t" + name + "relay/new\t\tcoverage: 0.0% of statements\n", 0, "coverage: relay/new has no tests in its directory\nFAIL\n", 1},
		"no statements":     {"ok  \t" + name + "consumer/elsewhere\t1.2s\tcoverage: [no statements]\n?   \t" + name + "x\t[no test files]\n", 0, "", 0},
		"no room":           {"\t" + name + "internal/relaytest\t\tcoverage: 0.0% of statements\nok  \t" + name + "cmd/demo\t1s\tcoverage: 1.0% of statements\n", 0, "", 0},
		"a command":         {"ok  \t" + name + "internal/cli/run\t1s\tcoverage: 15.8% of statements\n\t" + name + "internal/cli\t\tcoverage: 0.0% of statements\n", 0, "", 0},
		"a room among them": {"ok  \t" + name + "internal/cli/config\t1s\tcoverage: 60.0% of statements\n", 0, "coverage: internal/cli/config reaches 60 % from its own tests, not 70\nFAIL\n", 1},
		"a name like that":  {"\t" + name + "internal/relaytests\t\tcoverage: 0.0% of statements\n", 0, "coverage: internal/relaytests has no tests in its directory\nFAIL\n", 1},
		"failed":            {"ok  \t" + name + "outbox\t1.2s\tcoverage: 1.0% of statements\nFAIL\n", 3, "", 3},
	} {
		cmd := exec.CommandContext(t.Context(), "sh", ".ci/coverage.sh", "sh", "-c", `printf '%s' "$1"; exit "$2"`, "sh", c.output, string(rune('0'+c.status)))
		cmd.Dir = root
		out, err := cmd.Output()
		code := 0
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			code = exit.ExitCode()
		} else if err != nil {
			t.Fatal(err)
		}
		if added, passed := strings.CutPrefix(string(out), c.output); !passed || added != c.want || code != c.code {
			t.Errorf("%s: exit code %d, %q", what, code, out)
		}
	}
}
