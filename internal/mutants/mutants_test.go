package mutants

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
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

// verdict returns what is wrong with a test run of a mutant: "" if a test failed, as it must.
func verdict(output string, passed bool) string {
	switch {
	case strings.Contains(output, "no tests to run"):
		return "the pattern names no test"
	case passed:
		return "no test caught the bug"
	case strings.Contains(output, "[build failed]") || strings.Contains(output, "[setup failed]"):
		return "the mutant does not compile"
	case !strings.Contains(output, "--- FAIL: "):
		return "the run failed, but no test did"
	}
	return ""
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
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			command := exec.CommandContext(ctx, "go", "test", "-vet", "off", "-overlay", overlay, "-count", "1", "-run", m.test, "./"+m.pkg)
			command.Dir = root
			// Templates that were made before would hide a bug in a migration.
			command.Env = append(os.Environ(), localpg.DataVariable+"=")
			var output bytes.Buffer
			command.Stdout, command.Stderr = &output, &output
			passed := command.Run() == nil
			if wrong := verdict(output.String(), passed); wrong != "" {
				t.Errorf("%s: %s\n%s", m.bug, wrong, output.String())
			}
		})
	}
}

func TestVerdict(t *testing.T) {
	t.Parallel()
	for output, wrong := range map[string]bool{
		"--- FAIL: TestX (0.1s)\nFAIL":       false,
		"FAIL relay [build failed]":          true,
		"ok relay 0.1s [no tests to run]":    true,
		"panic: the database did not start.": true,
	} {
		if got := verdict(output, false); (got != "") != wrong {
			t.Errorf("%q: got %q", output, got)
		}
	}
	if verdict("ok relay 0.1s", true) == "" {
		t.Error("a bug that no test caught counts as caught")
	}
}
