package mutants

import (
	"context"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

var run = flag.Bool("mutants", false, "plant each bug and run the test that must catch it")

// A mutant is a bug, as a change of one place of the source, and the test that must catch it.
type mutant struct {
	bug  string
	file string // from the top of the repository
	old  string // stands in the file exactly once
	new  string
	pkg  string
	test string // a pattern of -run
	says string // in a line of the test's failure: any other failure is not the bug's
}

// build writes the changed file and returns the overlay that puts it in the place of the original.
func (m *mutant) build(t *testing.T, root string) (overlay string) {
	t.Helper()
	original := filepath.Join(root, filepath.FromSlash(m.file))
	source, err := os.ReadFile(original)
	testkit.Must(t, err)
	if n := strings.Count(string(source), m.old); n != 1 {
		t.Fatalf("%s has the text %d times, want once: %q; adapt the mutant to the code", m.file, n, m.old)
	}
	dir := t.TempDir()
	changed := filepath.Join(dir, "changed"+filepath.Ext(original))
	testkit.Must(t, os.WriteFile(changed, []byte(strings.Replace(string(source), m.old, m.new, 1)), 0o600))
	list, err := json.Marshal(map[string]map[string]string{"Replace": {original: changed}})
	testkit.Must(t, err)
	overlay = filepath.Join(dir, "overlay.json")
	testkit.Must(t, os.WriteFile(overlay, list, 0o600))
	return overlay
}

// verdict returns what is wrong with a test run of a mutant: "" if a test failed and said what it
// must.
func verdict(output string, passed bool, says string) string {
	switch {
	case strings.Contains(output, "no tests to run"):
		return "the pattern names no test"
	case passed:
		return "no test caught the bug"
	case strings.Contains(output, "[build failed]") || strings.Contains(output, "[setup failed]"):
		return "the mutant does not compile"
	case !strings.Contains(output, "--- FAIL: "):
		return "the run failed, but no test did"
	case !strings.Contains(output, says):
		return "a test failed, and not for the bug: want " + says
	}
	return ""
}

// goTest runs tests of a package and returns what they print.
func goTest(t *testing.T, root, pkg, tests string, flags ...string) (output string, passed bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, "go", slices.Concat([]string{"test", "-vet", "off", "-count", "1", "-run", tests}, flags, []string{"./" + pkg})...)
	command.Dir = root
	// Templates that were made before would hide a bug in a migration.
	command.Env = append(os.Environ(), localpg.DataVariable+"=")
	out, err := command.CombinedOutput()
	return string(out), err == nil
}

// Without a bug, each test passes: what a mutant fails for is its bug.
func TestControl(t *testing.T) {
	t.Parallel()
	root, err := filepath.Abs("../..")
	testkit.Must(t, err)
	tests := map[string][]string{}
	for _, m := range mutants {
		tests[m.pkg] = append(tests[m.pkg], m.test)
	}
	for pkg, names := range tests {
		t.Run(strings.ReplaceAll(pkg, "/", "-"), func(t *testing.T) {
			if !*run {
				return
			}
			if output, passed := goTest(t, root, pkg, strings.Join(names, "|")); !passed {
				t.Errorf("the tests fail without any bug:\n%s", output)
			}
		})
	}
}

// Each text must stand in the source, whether or not the mutants are run.
func TestMutants(t *testing.T) {
	t.Parallel()
	root, err := filepath.Abs("../..")
	testkit.Must(t, err)
	for _, m := range mutants {
		t.Run(strings.ReplaceAll(m.bug, " ", "-"), func(t *testing.T) {
			overlay := m.build(t, root)
			if !*run {
				return
			}
			output, passed := goTest(t, root, m.pkg, m.test, "-overlay", overlay)
			if wrong := verdict(output, passed, m.says); wrong != "" {
				t.Errorf("%s: %s\n%s", m.bug, wrong, output)
			}
		})
	}
}

func TestVerdict(t *testing.T) {
	t.Parallel()
	for output, wrong := range map[string]bool{
		"--- FAIL: TestX (0.1s)\n x_test.go:7: lost\nFAIL":  false,
		"--- FAIL: TestX (0.1s)\n x_test.go:7: other\nFAIL": true,
		"FAIL relay [build failed]":                         true,
		"ok relay 0.1s [no tests to run]":                   true,
		"panic: the database did not start.":                true,
	} {
		if got := verdict(output, false, "lost"); (got != "") != wrong {
			t.Errorf("%q: got %q", output, got)
		}
	}
	if verdict("ok relay 0.1s", true, "") == "" {
		t.Error("a bug that no test caught counts as caught")
	}
}
