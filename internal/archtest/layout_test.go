package archtest

import (
	"fmt"
	"go/ast"
	"path"
	"slices"
	"strings"
	"testing"
)

// The house. The review of a new room says what it is for.
var (
	topLevel = []string{
		"cmd", "outbox", "relay", "consumer", "migrations", "internal", "docs",
		"docker-compose.yml", "Makefile", "go.mod", "go.sum", "README.md", "LICENSE", "CONTRIBUTING.md",
	}
	optionalTopLevel = []string{"CHANGELOG.md", "SECURITY.md", "Dockerfile", ".dockerignore", ".ci", ".gitignore", ".gitattributes", ".golangci.yml"}

	// The rooms of relay and of the commands are not listed: each explains itself in its doc.go.
	goPackages = []string{
		"cmd/outbox-relay", "cmd/demo", "cmd/demo-cluster", "cmd/sbom", "cmd/release", "cmd/release/roots", "outbox", "relay", "consumer", "consumer/promobserver", "migrations",
		"consumer/inbox", "consumer/sqlconsumer", "consumer/store", "consumer/breaker", "consumer/consumertest",
		"consumer/internal/memory", "consumer/internal/headers", "consumer/internal/verdict", "consumer/internal/sqlstate",
		"consumer/internal/handlerctx", "consumer/internal/message", "consumer/internal/redact",
		"consumer/storetest", "consumer/redisstore", "consumer/dynamostore", "consumer/natsconsumer", "consumer/kafkaconsumer",
		"consumer/examples", "consumer/examples/internal/server", "consumer/examples/internal/exampletest",
		"consumer/examples/nethttp", "consumer/examples/chi", "consumer/examples/echo", "consumer/examples/gin", "consumer/examples/sqlx",
		"consumer/examples/gorm", "consumer/examples/svix", "consumer/examples/stripe", "consumer/examples/worker",
		"consumer/examples/nats", "consumer/examples/kafka",
		"consumer/elsewhere",
		"internal/webhook", "internal/check", "internal/admin", "internal/admin/guard", "internal/admin/history", "internal/admin/control", "internal/admin/api", "internal/admin/page", "internal/admin/browser", "internal/metrics", "internal/plain", "internal/settings", "internal/shortsleep", "internal/notify", "internal/traces", "internal/inboxops",
		"internal/archtest", "internal/localpg", "internal/localpg/pgtest", "internal/localpg/withpg", "internal/localserver", "internal/localnats", "internal/process", "internal/relaytest",
		"internal/testsize", "docs/deploy/rulestest", "docs/deploy/charttest", "internal/bench", "internal/procstat", "internal/natstest", "internal/kafkatest", "internal/cli",
	}

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
		dir := path.Dir(name)
		room := path.Dir(dir) == "relay" || path.Dir(dir) == "internal/cli"
		if strings.HasSuffix(name, ".go") && !room && !slices.Contains(goPackages, dir) && !strings.Contains(dir, "testdata") {
			violations = append(violations, name+": is in a package that the house does not have")
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
	for _, name := range []string{"scripts/run.sh", "notes.txt", "relay/util/x.sql", "relay/ops/bulk/bulk.go", "internal/cli/inbox/list/list.go", "internal/clock/clock.go"} {
		if found := strangeLayout(append(slices.Clone(topLevel), name)); len(found) != 1 {
			t.Errorf("%s: reported %q, want once", name, found)
		}
	}
	if found := strangeLayout(topLevel[1:]); len(found) != 1 {
		t.Errorf("a missing entry: reported %q, want once", found)
	}
}

// untestedModules returns the modules, other than the one at the top, that the Makefile does not name. ./... does not enter
// them, so that nothing else would test them.
func untestedModules(names []string, makefile string) (violations []string) {
	for _, name := range names {
		dir := path.Dir(name)
		if path.Base(name) == "go.mod" && dir != "." && !strings.Contains(makefile, dir) {
			violations = append(violations, name+": no target of the Makefile tests this module")
		}
	}
	return violations
}

func TestEveryModuleIsTested(t *testing.T) {
	t.Parallel()
	makefile := read(t, "Makefile")
	for _, violation := range untestedModules(tree(t), makefile) {
		t.Error(violation)
	}
	if found := untestedModules([]string{"go.mod", "consumer/other/go.mod"}, makefile); len(found) != 1 {
		t.Errorf("a module without tests: reported %q, want once", found)
	}
}

// limits are the most lines that a file may have. The first pattern that matches counts.
var limits = []struct {
	pattern string
	lines   int
}{
	{"README.md", 200},
	{"cmd/outbox-relay/main.go", 80},
	{"*.go", 500},
	{"*.sql", 500},
	{"*.sh", 300},
}

func tooLong(name, text string) string {
	for _, limit := range limits {
		if ok, _ := path.Match(limit.pattern, name); !ok {
			if ok, _ := path.Match(limit.pattern, path.Base(name)); !ok {
				continue
			}
		}
		if lines := strings.Count(text, "\n"); lines > limit.lines {
			return fmt.Sprintf("%s: has %d lines, at most %d are allowed", name, lines, limit.lines)
		}
		return ""
	}
	return ""
}

func TestFilesAreShort(t *testing.T) {
	t.Parallel()
	for _, name := range tree(t) {
		if violation := tooLong(name, read(t, name)); violation != "" {
			t.Error(violation)
		}
	}
	for name, lines := range map[string]int{"relay/store.go": 501, "README.md": 201, "cmd/outbox-relay/main.go": 81, "migrations/outbox/1.sql": 501} {
		if tooLong(name, strings.Repeat("\n", lines)) == "" {
			t.Errorf("%s with %d lines was accepted", name, lines)
		}
		if violation := tooLong(name, strings.Repeat("\n", lines-1)); violation != "" {
			t.Error(violation)
		}
	}
}

// maxPackage is the most lines that a package may have, without its tests.
const maxPackage = 5000

func tooLargePackages(lines map[string]int) (violations []string) {
	for dir, n := range lines {
		if n > maxPackage {
			violations = append(violations, fmt.Sprintf("%s: has %d lines, at most %d are allowed; make rooms", dir, n, maxPackage))
		}
	}
	return violations
}

func TestPackagesAreSmall(t *testing.T) {
	t.Parallel()
	lines := map[string]int{}
	for _, s := range repository(t) {
		if !s.isTest() {
			lines[s.dir()] += strings.Count(s.text, "\n")
		}
	}
	for _, violation := range tooLargePackages(lines) {
		t.Error(violation)
	}
	if found := tooLargePackages(map[string]int{"consumer": maxPackage + 1, "outbox": maxPackage}); len(found) != 1 {
		t.Errorf("reported %q, want one package", found)
	}
}

// A library explains itself in doc.go, where readers look first, or in its only file; a command above its main.
func undocumentedPackages(files []*source) (violations []string) {
	for dir, sources := range packages(files) {
		where, documented := "doc.go", map[string]bool{}
		for _, s := range sources {
			if s.isTest() {
				continue
			}
			documented[s.base()] = s.file.Doc != nil
			if s.isMain() {
				where = "main.go"
			}
		}
		for only := range documented {
			if len(documented) == 1 {
				where = only
			}
		}
		if !documented[where] {
			violations = append(violations, fmt.Sprintf("%s: has no package comment in %s", dir, where))
		}
	}
	slices.Sort(violations)
	return violations
}

func TestPackagesAreDocumented(t *testing.T) {
	t.Parallel()
	enforce(t, undocumentedPackages)
	reports(t, undocumentedPackages, map[string]snippet{
		"no doc.go":                 {text: "// A comment.\ntype t int"},
		"doc.go without a comment":  {path: "relay/doc.go"},
		"a command without comment": {path: "cmd/demo/main.go"},
	})
}

// undocumented finds what the linter leaves out: constants, variables, and the fields of structs by which a caller
// configures a package. One comment may stand for the lines that follow it without a gap.
func undocumented(files []*source) (violations []string) {
	for _, sources := range packages(files) {
		configured := configuration(sources)
		for _, s := range sources {
			if !s.isLibrary() {
				continue
			}
			for _, decl := range s.file.Decls {
				group, ok := decl.(*ast.GenDecl)
				if !ok {
					continue
				}
				var block commented
				for _, spec := range group.Specs {
					switch spec := spec.(type) {
					case *ast.ValueSpec:
						if name := spec.Names[0]; !block.has(s, spec, group.Doc, spec.Doc, spec.Comment) && name.IsExported() {
							violations = append(violations, s.at(name, "%s has no comment", name.Name))
						}
					case *ast.TypeSpec:
						if fields, ok := spec.Type.(*ast.StructType); ok && configured[spec.Name.Name] {
							violations = append(violations, s.undocumentedFields(spec.Name.Name, fields)...)
						}
					}
				}
			}
		}
	}
	return violations
}

func (s *source) undocumentedFields(owner string, fields *ast.StructType) (violations []string) {
	var block commented
	for _, field := range fields.Fields.List {
		documented := block.has(s, field, field.Doc, field.Comment)
		for _, name := range field.Names {
			if name.IsExported() && !documented {
				violations = append(violations, s.at(name, "%s.%s has no comment", owner, name.Name))
			}
		}
	}
	return violations
}

// commented remembers, from line to line of a block, whether a comment stands for what follows.
type commented struct {
	documented bool
	lastLine   int
}

func (c *commented) has(s *source, n ast.Node, comments ...*ast.CommentGroup) bool {
	follows := c.documented && s.fset.Position(n.Pos()).Line == c.lastLine+1
	c.lastLine = s.fset.Position(n.End()).Line
	c.documented = follows
	for _, comment := range comments {
		c.documented = c.documented || comment != nil
	}
	return c.documented
}

// configuration names the struct types of a package that callers fill in: those below, and what their fields hold.
func configuration(sources []*source) map[string]bool {
	structs := map[string]*ast.StructType{}
	for _, s := range sources {
		s.each(func(n ast.Node) {
			if spec, ok := n.(*ast.TypeSpec); ok && !s.isTest() {
				if fields, ok := spec.Type.(*ast.StructType); ok {
					structs[spec.Name.Name] = fields
				}
			}
		})
	}
	reached := map[string]bool{}
	var reach func(name string)
	reach = func(name string) {
		if structs[name] == nil || reached[name] {
			return
		}
		reached[name] = true
		for _, field := range structs[name].Fields.List {
			ast.Inspect(field.Type, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.FuncType: // what a hook is told is not configuration
					return false
				case *ast.Ident:
					reach(n.Name)
				}
				return true
			})
		}
	}
	for _, name := range []string{"Config", "Options", "Event", "Producer", "Hooks"} {
		reach(name)
	}
	return reached
}

func TestExportedNamesAreDocumented(t *testing.T) {
	t.Parallel()
	enforce(t, undocumented)
	reports(t, undocumented, map[string]snippet{
		"a constant":           {text: "const Answer = 42"},
		"one after a gap":      {text: "const (\n\tA = 1 // one\n\n\tB = 2\n)"},
		"a variable":           {text: "var (\n\tErrX = 1\n)"},
		"a field":              {text: "type Config struct {\n\tX int\n}"},
		"a field of a section": {path: "consumer/config.go", text: "type Config struct {\n\tX []T // x\n}\ntype T struct {\n\tY int\n}"},
	})
	accepts(t, undocumented, map[string]snippet{
		"a commented group":      {text: "// Limits.\nconst (\n\tA = 1\n\n\tB = 2\n)"},
		"a run of lines":         {text: "const (\n\t// The first two.\n\tA = 1\n\tB = 2\n)"},
		"trailing comments":      {text: "const (\n\tA = 1 // one\n)\ntype Config struct {\n\tX int // x\n}"},
		"what is unexported":     {text: "type config struct {\n\tX int\n}\nconst a = 1"},
		"what a package returns": {text: "type Status struct {\n\tName string\n}"},
	})
}
