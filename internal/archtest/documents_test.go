package archtest

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

// documents returns the text of every document by its name.
func documents(t *testing.T) map[string]string {
	t.Helper()
	texts := map[string]string{}
	for _, name := range tree(t) {
		if path.Ext(name) == ".md" {
			texts[name] = read(t, name)
		}
	}
	return texts
}

var (
	markdownLink = regexp.MustCompile(`\]\(([^)#\s]*)(?:#([^)\s]*))?\)`)
	heading      = regexp.MustCompile(`^#{1,6} +(.*\S)`)
	linkTarget   = regexp.MustCompile(`\]\([^)]*\)`)
	noSlug       = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
	sourceFile   = regexp.MustCompile("`(/?[a-z][\\w./-]*/[\\w.-]+\\.go)`") // with a leading slash: at the top of the repository
	makeCall     = regexp.MustCompile("(?m)(?:^|`|&& )make ([a-z][a-z-]*)")
	makeTarget   = regexp.MustCompile(`(?m)^([a-z][a-z-]*):`)
	testName     = regexp.MustCompile(`\bTest[A-Z]\w+`)
	testFunction = regexp.MustCompile(`(?m)^func (Test[A-Z]\w+)\(`)
	decision     = regexp.MustCompile(`docs/decisions/\d{4}-[a-z0-9-]+\.md`)
	anchorOf     = regexp.MustCompile(`(docs/[\w/-]+\.md)#([\w-]+)`)
)

func exists(name string) bool {
	_, err := os.Stat(filepath.Join(root, name))
	return err == nil
}

// anchors returns the anchors that GitHub gives the headings of a document.
func anchors(text string) map[string]bool {
	found, inBlock := map[string]bool{}, false
	for line := range strings.Lines(text) {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			inBlock = !inBlock
		}
		title := heading.FindStringSubmatch(line)
		if inBlock || title == nil {
			continue
		}
		slug := noSlug.ReplaceAllString(strings.ToLower(linkTarget.ReplaceAllString(title[1], "")), "")
		slug = strings.ReplaceAll(slug, " ", "-")
		unique := slug
		for n := 1; found[unique]; n++ {
			unique = fmt.Sprintf("%s-%d", slug, n)
		}
		found[unique] = true
	}
	return found
}

func TestAnchors(t *testing.T) {
	t.Parallel()
	got := anchors("# A `b` & C: d_e\n```sh\n# no heading\n```\n## Why, [then](x.md)?\n### Why, then\n")
	want := map[string]bool{"a-b--c-d_e": true, "why-then": true, "why-then-1": true}
	if !maps.Equal(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
}

// brokenLink returns what is wrong with a link of a document; empty: nothing.
func brokenLink(name, text, target, anchor string) string {
	if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
		return ""
	}
	if target != "" {
		content, err := os.ReadFile(filepath.Join(root, path.Dir(name), target))
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Sprintf("%s: links to %s, which does not exist", name, target)
		}
		text = string(content)
	}
	if anchor == "" || path.Ext(cmp.Or(target, name)) != ".md" || anchors(text)[anchor] {
		return ""
	}
	return fmt.Sprintf("%s: links to #%s of %s, which has no such heading", name, anchor, cmp.Or(target, name))
}

// brokenReferences returns the files, headings and make targets that a document names and that do
// not exist.
func brokenReferences(name, text, makefile string) (violations []string) {
	for _, link := range markdownLink.FindAllStringSubmatch(text, -1) {
		if violation := brokenLink(name, text, link[1], link[2]); violation != "" {
			violations = append(violations, violation)
		}
	}
	for _, file := range sourceFile.FindAllStringSubmatch(text, -1) {
		if !exists(file[1]) && (strings.HasPrefix(file[1], "/") || !exists("internal/relay/"+file[1])) {
			violations = append(violations, fmt.Sprintf("%s: names %s, which does not exist, nor in internal/relay", name, file[1]))
		}
	}
	targets := map[string]bool{}
	for _, target := range makeTarget.FindAllStringSubmatch(makefile, -1) {
		targets[target[1]] = true
	}
	for _, call := range makeCall.FindAllStringSubmatch(text, -1) {
		if !targets[call[1]] {
			violations = append(violations, fmt.Sprintf("%s: says make %s, which the Makefile does not have", name, call[1]))
		}
	}
	return violations
}

func TestDocumentsReferToWhatExists(t *testing.T) {
	t.Parallel()
	makefile := read(t, "Makefile")
	for name, text := range documents(t) {
		for _, violation := range brokenReferences(name, text, makefile) {
			t.Error(violation)
		}
	}
	tests := map[string]bool{}
	for _, name := range tree(t) {
		if strings.HasSuffix(name, "_test.go") {
			for _, found := range testFunction.FindAllStringSubmatch(read(t, name), -1) {
				tests[found[1]] = true
			}
		}
	}
	for name, text := range documents(t) {
		for _, test := range testName.FindAllString(text, -1) {
			if !tests[test] {
				t.Errorf("%s: names %s, which does not exist", name, test)
			}
		}
	}
	for _, name := range tree(t) { // code, its comments and its messages refer to decisions and headings
		text := read(t, name)
		for _, page := range decision.FindAllString(text, -1) {
			if !exists(page) {
				t.Errorf("%s: names %s, which does not exist", name, page)
			}
		}
		for _, named := range anchorOf.FindAllStringSubmatch(text, -1) {
			if strings.HasSuffix(named[2], "-") { // the code appends the rest
				continue
			}
			if !exists(named[1]) || !anchors(read(t, named[1]))[named[2]] {
				t.Errorf("%s: names %s, which does not exist", name, named[0])
			}
		}
	}
	for _, text := range []string{"[the runbook](docs/runbook.md)", "[limits](#limit)", "[security](SECURITY.md#nothing)", "see `relay/lanes.go`", "see `/lane/lanes.go`", "run `make coffee`", "```sh\nmake coffee # soon\n```"} {
		if found := brokenReferences("README.md", text, makefile); len(found) != 1 {
			t.Errorf("%q: reported %q, want once", text, found)
		}
	}
	if found := brokenReferences("docs/x.md", "# Limits\n[license](../LICENSE#mit), [site](https://example.com/x#y), [batches](wire.md#batches), [limits](#limits), `make test`, `lane/lanes.go`, `relay/claimer.go`, `/relay/claimer.go`", "test:\n"); len(found) != 0 {
		t.Errorf("wrongly reported: %q", found)
	}
}

var (
	relayCall   = regexp.MustCompile("(?m)(?:^ *|`)outbox-relay ([^`#\n]*)")
	placeholder = regexp.MustCompile(`^[A-Z]+$`)
)

// relayCalls returns the arguments of every call of outbox-relay that a document shows.
func relayCalls(text string) (calls [][]string) {
	for _, call := range relayCall.FindAllStringSubmatch(text, -1) {
		command, _, _ := strings.Cut(call[1], " |")
		args := strings.Fields(command)
		for i, arg := range args {
			if placeholder.MatchString(arg) { // an ID, a NAME
				args[i] = "1"
			}
		}
		calls = append(calls, args)
	}
	return calls
}

func TestRelayCallsInDocuments(t *testing.T) {
	t.Parallel()
	got := relayCalls("run `outbox-relay events show ID` or\n\n    outbox-relay status --json   # all\n`outbox-relay run | migrate`; outbox-relay does it")
	want := [][]string{{"events", "show", "1"}, {"status", "--json"}, {"run"}}
	if !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("found %q, want %q", got, want)
	}
}

func testDocumentedCalls(t *testing.T, relay string) {
	found := 0
	for name, text := range documents(t) {
		for _, args := range relayCalls(text) {
			found++
			if err := understood(t, relay, args...); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if found == 0 {
		t.Error("no document shows how to call outbox-relay")
	}
	if err := understood(t, relay, "status", "--jsno"); err == nil {
		t.Error("an unknown flag was accepted")
	}
}

// blocks returns the fenced blocks of one language, without the indentation of the list that they
// stand in.
func blocks(text, language string) (found []string) {
	var block strings.Builder
	indent, inside := "", false
	for line := range strings.Lines(text) {
		trimmed := strings.TrimSpace(line)
		switch {
		case !inside && trimmed == "```"+language:
			indent, inside = line[:strings.Index(line, "`")], true
		case inside && trimmed == "```":
			found, inside = append(found, block.String()), false
			block.Reset()
		case inside:
			block.WriteString(strings.TrimPrefix(line, indent))
		}
	}
	return found
}

func TestBlocks(t *testing.T) {
	t.Parallel()
	text := "```sh\nls\n```\n1. x\n\n   ```sql\n   SELECT 1;\n     SELECT 2;\n   ```\n```sql\nSELECT 3\n```\n"
	if got, want := blocks(text, "sql"), []string{"SELECT 1;\n  SELECT 2;\n", "SELECT 3\n"}; !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
}

var variable = regexp.MustCompile(`\$\{([A-Z_]+)\}`)

// testDocumentedConfigurations tries what a reader would copy into outbox-relay.yaml.
func testDocumentedConfigurations(t *testing.T, relay string) {
	found := 0
	for name, text := range documents(t) {
		for _, block := range blocks(text, "yaml") {
			found++
			env := map[string]string{}
			for _, reference := range variable.FindAllStringSubmatch(block, -1) {
				switch variable := reference[1]; {
				case strings.Contains(variable, "SECRET"):
					env[variable] = testSecret
				case strings.Contains(variable, "DATABASE"):
					env[variable] = "postgres://localhost/finance"
				default:
					env[variable] = "https://example.com/x"
				}
			}
			file := filepath.Join(t.TempDir(), "outbox-relay.yaml")
			testkit.Must(t, os.WriteFile(file, []byte(block), 0o600))
			if err := configured(t, relay, pairs(env), "--config", file); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if found == 0 {
		t.Error("no document shows a configuration")
	}
}

// A runbook is read when there is no time to find out that its SQL is for the schema before last.
func TestDocumentedSQLRuns(t *testing.T) {
	t.Parallel()
	dsn := pgtest.StartCopy(t, localpg.Options{}).DSN("") // they create roles, which belong to all of a server
	pgtest.Migrate(t, dsn, migrations.Outbox, migrations.Inbox)
	pool := pgtest.Pool(t, dsn)
	found := 0
	for name, text := range documents(t) {
		for _, block := range blocks(text, "sql") {
			found++
			block = strings.ReplaceAll(block, "DATABASE finance", "DATABASE postgres")
			if _, err := pool.Exec(t.Context(), block); err != nil {
				t.Errorf("%s: %v\n%s", name, err, block)
			}
		}
	}
	if found == 0 {
		t.Error("no document shows SQL")
	}
}
