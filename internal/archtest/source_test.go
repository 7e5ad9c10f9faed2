package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// module is the import path of this module.
const module = "github.com/outbox-relay/outbox-relay"

// root leads from this package to the top of the repository.
const root = "../.."

// A source is one Go file, parsed but not type-checked.
type source struct {
	path    string // from the top of the repository, with slashes
	text    string
	fset    *token.FileSet
	file    *ast.File
	imports map[string]string // path by the name under which the file uses it
}

// A check returns what breaks its rule in files, one line each, beginning with the place.
type check func(files []*source) []string

// enforce runs a check on this repository.
func enforce(t *testing.T, c check) {
	t.Helper()
	for _, violation := range c(repository(t)) {
		t.Error(violation)
	}
}

// A snippet is a file that a check is tried on.
type snippet struct {
	path string // empty: relay/snippet.go
	text string // without the package clause
}

func (s snippet) source(t *testing.T) *source {
	t.Helper()
	if s.path == "" {
		s.path = "relay/snippet.go"
	}
	name := path.Base(path.Dir(s.path))
	if strings.HasPrefix(s.path, "cmd/") {
		name = "main"
	}
	return parse(t, s.path, "package "+name+"\n"+s.text)
}

// reports proves that a check finds fault with each snippet. The keys say what is wrong with it.
func reports(t *testing.T, c check, snippets map[string]snippet) {
	t.Helper()
	for name, s := range snippets {
		if found := c([]*source{s.source(t)}); len(found) != 1 {
			t.Errorf("%s: reported %d times, want once: %q", name, len(found), found)
		}
	}
}

// accepts proves that a check has nothing against a snippet.
func accepts(t *testing.T, c check, snippets map[string]snippet) {
	t.Helper()
	for name, s := range snippets {
		for _, violation := range c([]*source{s.source(t)}) {
			t.Errorf("%s: wrongly reported: %s", name, violation)
		}
	}
}

func parse(t *testing.T, path, text string) *source {
	t.Helper()
	s := &source{path: path, text: text, fset: token.NewFileSet(), imports: map[string]string{}}
	var err error
	if s.file, err = parser.ParseFile(s.fset, path, text, parser.ParseComments); err != nil {
		t.Fatal(err)
	}
	for _, spec := range s.file.Imports {
		imported := unquote(spec.Path)
		name := importName(imported)
		if spec.Name != nil {
			name = spec.Name.Name
		}
		s.imports[name] = imported
	}
	return s
}

// importName guesses the name of a package from its path: the last element that is no version.
func importName(imported string) string {
	name := path.Base(imported)
	if _, err := strconv.Atoi(strings.TrimPrefix(name, "v")); err == nil && strings.HasPrefix(name, "v") {
		name = path.Base(path.Dir(imported))
	}
	return name
}

func unquote(literal *ast.BasicLit) string {
	text, _ := strconv.Unquote(literal.Value) // the parser accepts no other
	return text
}

// repository returns every Go file of this repository.
var repository = func() func(t *testing.T) []*source {
	var once sync.Once
	var sources []*source
	return func(t *testing.T) []*source {
		t.Helper()
		once.Do(func() {
			for _, name := range tree(t) {
				if strings.HasSuffix(name, ".go") {
					sources = append(sources, parse(t, name, read(t, name)))
				}
			}
		})
		return sources
	}
}()

// tree lists the files of this repository that are not ignored, whether or not they have been added
// to it. Outside a repository, such as in an unpacked archive, it lists all files but those of bin.
func tree(t *testing.T) []string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
	cmd.Dir = root
	if out, err := cmd.Output(); err == nil {
		names := slices.Compact(slices.Sorted(strings.SplitSeq(strings.Trim(string(out), "\x00"), "\x00")))
		for _, name := range names {
			// go test cannot see what git reads. A directory that this process has read makes it
			// run the tests again when a file is added there, instead of repeating a result from
			// its cache.
			_, _ = os.ReadDir(filepath.Join(root, path.Dir(name)))
		}
		return slices.DeleteFunc(names, func(name string) bool {
			_, err := os.Lstat(filepath.Join(root, name))
			return err != nil // deleted, but still in the index
		})
	}
	var names []string
	err := filepath.WalkDir(root, func(name string, entry os.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == ".git" || name == filepath.Join(root, "bin")):
			return filepath.SkipDir
		case entry.Type().IsRegular():
			rel, err := filepath.Rel(root, name)
			names = append(names, filepath.ToSlash(rel))
			return err
		}
		return nil
	})
	testkit.Must(t, err)
	return names
}

func read(t *testing.T, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(root, name))
	testkit.Must(t, err)
	return string(content)
}

func (s *source) dir() string  { return path.Dir(s.path) }
func (s *source) base() string { return path.Base(s.path) }
func (s *source) isTest() bool { return strings.HasSuffix(s.path, "_test.go") }

// isEngine reports whether a file belongs to package relay or to one of its rooms, the packages of
// internal/relay.
func (s *source) isEngine() bool {
	return s.dir() == "relay" || strings.HasPrefix(s.path, "internal/relay/")
}

func (s *source) isLibrary() bool {
	if rest, ok := strings.CutPrefix(s.dir(), "consumer/"); ok && !s.isTest() {
		return slices.Contains([]string{"inbox", "sqlconsumer", "store", "breaker", "consumertest", "natsconsumer", "kafkaconsumer"}, rest) || strings.HasPrefix(rest, "internal/")
	}
	return !s.isTest() && (s.isEngine() || slices.Contains([]string{"outbox", "consumer", "internal/inboxops", "internal/inboxsql", "internal/reconcile", "internal/reconcile/compare"}, s.dir()))
}

// at formats one violation.
func (s *source) at(n ast.Node, format string, args ...any) string {
	return fmt.Sprintf("%s:%d: %s", s.path, s.fset.Position(n.Pos()).Line, fmt.Sprintf(format, args...))
}

// each visits every node of the file.
func (s *source) each(visit func(n ast.Node)) {
	ast.Inspect(s.file, func(n ast.Node) bool {
		if n != nil {
			visit(n)
		}
		return true
	})
}

// qualified returns the import path and the name of an expression such as os.Getenv; otherwise
// empty texts.
func (s *source) qualified(n ast.Node) (imported, name string) {
	selector, ok := n.(*ast.SelectorExpr)
	if !ok {
		return "", ""
	}
	x, ok := selector.X.(*ast.Ident)
	if !ok || x.Obj != nil { // a local variable that is named like a package
		return "", ""
	}
	return s.imports[x.Name], selector.Sel.Name
}

// A ban names what an import path must not be used for. A name ending in * stands for all that
// begin with it.
type ban map[string][]string

func (b ban) has(imported, name string) bool {
	return slices.ContainsFunc(b[imported], func(banned string) bool {
		prefix, pattern := strings.CutSuffix(banned, "*")
		return name == banned || pattern && strings.HasPrefix(name, prefix)
	})
}

// packages groups files by directory.
func packages(files []*source) map[string][]*source {
	grouped := map[string][]*source{}
	for _, s := range files {
		grouped[s.dir()] = append(grouped[s.dir()], s)
	}
	return grouped
}
