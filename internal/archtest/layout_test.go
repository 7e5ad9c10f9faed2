package archtest

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

var (
	topLevel = []string{
		"cmd", "outbox", "relay", "consumer", "migrations", "internal", "docs",
		"docker-compose.yml", "Makefile", "go.mod", "go.sum", "go.work", "go.work.sum", "README.md", "LICENSE", "CONTRIBUTING.md",
	}
	optionalTopLevel = []string{"CHANGELOG.md", "SECURITY.md", "Dockerfile", ".dockerignore", ".ci", ".gitignore", ".gitattributes", ".golangci.yml", ".goreleaser.yaml"}

	// Names that say nothing about what is inside collect everything.
	vagueNames = []string{"pkg", "util", "utils", "common", "types", "models", "mocks", "helpers", "misc", "shared", "base"}
)

func strangeLayout(names []string) (violations []string) {
	present := map[string]bool{}
	for _, name := range names {
		top, _, _ := strings.Cut(name, "/")
		if !present[top] && !slices.Contains(topLevel, top) && !slices.Contains(optionalTopLevel, top) {
			violations = append(violations, top+": does not belong at the top level")
		}
		present[top] = true
		for step := range strings.SplitSeq(path.Dir(name), "/") {
			if slices.Contains(vagueNames, step) {
				violations = append(violations, fmt.Sprintf("%s: %q does not say what is inside", name, step))
			}
		}
	}
	for _, name := range topLevel {
		if !present[name] {
			violations = append(violations, name+": is missing")
		}
	}
	return violations
}

func TestLayout(t *testing.T) {
	t.Parallel()
	for _, violation := range strangeLayout(tree(t)) {
		t.Error(violation)
	}
	for _, name := range []string{"scripts/run.sh", "notes.txt", "relay/util/x.sql"} {
		if found := strangeLayout(append(slices.Clone(topLevel), name)); len(found) != 1 {
			t.Errorf("%s: reported %q, want once", name, found)
		}
	}
	if found := strangeLayout(topLevel[1:]); len(found) != 1 {
		t.Errorf("a missing entry: reported %q, want once", found)
	}
}

// forgottenModules returns the modules, other than the one at the top, that the Makefile does not
// test or that go.work does not use. ./... does not enter them, so that nothing else would test
// them, and an editor would not know them.
func forgottenModules(names []string, makefile, workspace string) (violations []string) {
	for _, name := range names {
		dir := path.Dir(name)
		if path.Base(name) != "go.mod" || dir == "." || strings.HasPrefix(dir, ".ci/") { // which pins a tool and has no code
			continue
		}
		if !strings.Contains(makefile, dir) {
			violations = append(violations, name+": no target of the Makefile tests this module")
		}
		if !strings.Contains(workspace, "\t./"+dir+"\n") {
			violations = append(violations, name+": go.work does not use this module; run go work use ./"+dir)
		}
	}
	return violations
}

func TestEveryModuleIsTestedAndInTheWorkspace(t *testing.T) {
	t.Parallel()
	makefile, workspace := read(t, "Makefile"), read(t, "go.work")
	for _, violation := range forgottenModules(tree(t), makefile, workspace) {
		t.Error(violation)
	}
	if found := forgottenModules([]string{"go.mod", "consumer/other/go.mod"}, makefile, workspace); len(found) != 2 {
		t.Errorf("a forgotten module: reported %q, want twice", found)
	}
}

// tooLong returns what is wrong with a file of more lines than a reader keeps in mind.
func tooLong(name, text string) string {
	limit := 500
	if name == "README.md" {
		limit = 200
	} else if path.Ext(name) != ".go" && path.Ext(name) != ".sql" || name == "docs/schema.sql" { // which nobody writes
		return ""
	}
	if lines := strings.Count(text, "\n"); lines > limit {
		return fmt.Sprintf("%s: has %d lines, at most %d are allowed", name, lines, limit)
	}
	return ""
}

func TestFilesAreShort(t *testing.T) {
	t.Parallel()
	for _, name := range tree(t) {
		testkit.Equal(t, "found", tooLong(name, read(t, name)), "")
	}
	for name, lines := range map[string]int{"relay/store.go": 501, "README.md": 201, "migrations/outbox/1.sql": 501} {
		if tooLong(name, strings.Repeat("\n", lines)) == "" || tooLong(name, strings.Repeat("\n", lines-1)) != "" {
			t.Errorf("%s: %d lines are not the first that are too many", name, lines)
		}
	}
}

// prose matches a line of a comment. What is indented in it, such as code and figures, is as wide
// as it needs to be.
var prose = regexp.MustCompile(`^\t*// \S`)

// wideComments returns the lines of a file whose comment is wider than 100 columns. A tab has four.
func wideComments(name, text string) (violations []string) {
	if path.Ext(name) != ".go" {
		return nil
	}
	for i, line := range strings.Split(text, "\n") {
		width := utf8.RuneCountInString(strings.ReplaceAll(line, "\t", "    "))
		if prose.MatchString(line) && width > 100 {
			violations = append(violations, fmt.Sprintf("%s:%d: the comment has %d columns, at most 100 are allowed", name, i+1, width))
		}
	}
	return violations
}

func TestCommentsAreNarrow(t *testing.T) {
	t.Parallel()
	for _, name := range tree(t) {
		if name == "outbox/example_test.go" {
			continue // its output is compared line by line
		}
		for _, violation := range wideComments(name, read(t, name)) {
			t.Error(violation)
		}
	}
	fits := "\t// " + strings.Repeat("ä", 93)
	testkit.Equal(t, "found", len(wideComments("a.go", fits+"\n"+fits+"ä\n//\t"+fits)), 1)
}
