package archtest

import (
	"go/ast"
	"go/token"
	"slices"
	"strings"
	"testing"
)

// globals are the variables of packages that the rule below cannot tell from mutable state, and why
// each may stay.
var globals = map[string]string{
	"internal/relay/post.guardian":         "the list of networks that are never dialled; immutable once made",
	"cmd/outbox-relay.version":             "set by the linker, which can set nothing but a variable",
	"cmd/outbox-relay.commit":              "as version",
	"consumer._":                           "as consumer/internal/memory.newReceiver",
	"consumer/internal/memory.newReceiver": "set once, by the initialisation of package consumer: the rooms beside it need what it does not export",
	"internal/hangup.before":               "set once, by the package's initialisation: no call of main comes early enough",
	"internal/localpg/pgtest.shared":       "one server for all tests of a process; testing offers no other place that outlives a test",
}

// State of a package is state of everybody who imports it: tests cannot run side by side, and two
// relays in one process share what neither configured. Sentinel errors, patterns and tables that
// nothing writes are constants in all but name.
func packageState(files []*source) (violations []string) {
	seen := map[string]bool{}
	for dir, sources := range packages(files) {
		written := writtenNames(sources)
		for _, s := range sources {
			if s.isTest() {
				continue
			}
			for _, decl := range s.file.Decls {
				if function, ok := decl.(*ast.FuncDecl); ok && function.Name.Name == "init" && function.Recv == nil {
					violations = append(violations, s.at(function, "an init function runs whether or not anybody wants it"))
				}
				group, ok := decl.(*ast.GenDecl)
				if !ok || group.Tok != token.VAR {
					continue
				}
				for _, spec := range group.Specs {
					spec := spec.(*ast.ValueSpec)
					for i, name := range spec.Names {
						key := dir + "." + name.Name
						_, excepted := globals[key]
						seen[key] = true
						if !excepted && (written[name.Name] || !s.isConstant(group, spec, i)) {
							violations = append(violations, s.at(name, "%s is state of the package; pass it along instead", name.Name))
						}
					}
				}
			}
		}
	}
	if len(packages(files)) > 1 { // the whole repository
		for key := range globals {
			if !seen[key] {
				violations = append(violations, key+": is excepted but does not exist")
			}
		}
	}
	return violations
}

// isConstant reports whether a variable is a constant in all but name, provided that nothing writes
// to it.
func (s *source) isConstant(group *ast.GenDecl, spec *ast.ValueSpec, i int) bool {
	name := spec.Names[i]
	if name.Name == "_" {
		return true
	}
	for _, doc := range []*ast.CommentGroup{group.Doc, spec.Doc} {
		if doc != nil && strings.Contains(doc.List[len(doc.List)-1].Text, "//go:embed ") {
			return true
		}
	}
	if i >= len(spec.Values) {
		return false
	}
	switch value := spec.Values[i].(type) {
	case *ast.CallExpr:
		imported, called := s.qualified(value.Fun)
		switch imported {
		case "errors":
			return called == "New"
		case "regexp", "net/netip":
			return strings.HasPrefix(called, "Must")
		}
	case *ast.SelectorExpr: // a sentinel under the name that users know
		imported, selected := s.qualified(value)
		return imported != "" && strings.HasPrefix(name.Name, "Err") && strings.HasPrefix(selected, "Err")
	case *ast.CompositeLit:
		switch value.Type.(type) {
		case *ast.ArrayType, *ast.MapType:
			return !name.IsExported()
		default:
			return !name.IsExported() && isPlain(value)
		}
	}
	return false
}

// isPlain reports whether a literal calls nothing and points to nothing.
func isPlain(literal *ast.CompositeLit) bool {
	plain := true
	ast.Inspect(literal, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr, *ast.FuncLit:
			plain = false
		case *ast.UnaryExpr:
			plain = plain && n.Op != token.AND
		}
		return plain
	})
	return plain
}

// writtenNames returns the names that a package assigns to, takes the address of, or hands to a
// function that writes. Local variables of the same name count too: shadowing such a table would
// mislead readers anyway.
func writtenNames(sources []*source) map[string]bool {
	written := map[string]bool{}
	write := func(n ast.Expr) {
		for {
			switch x := n.(type) {
			case *ast.IndexExpr:
				n = x.X
			case *ast.SelectorExpr:
				n = x.X
			case *ast.StarExpr:
				n = x.X
			case *ast.ParenExpr:
				n = x.X
			case *ast.Ident:
				written[x.Name] = true
				return
			default:
				return
			}
		}
	}
	for _, s := range sources {
		if s.isTest() {
			continue
		}
		s.each(func(n ast.Node) {
			switch n := n.(type) {
			case *ast.AssignStmt:
				if n.Tok != token.DEFINE {
					for _, left := range n.Lhs {
						write(left)
					}
				}
			case *ast.IncDecStmt:
				write(n.X)
			case *ast.UnaryExpr:
				if n.Op == token.AND {
					write(n.X)
				}
			case *ast.CallExpr:
				if name, ok := n.Fun.(*ast.Ident); ok && slices.Contains([]string{"delete", "clear", "copy"}, name.Name) {
					write(n.Args[0])
				}
			}
		})
	}
	return written
}

func TestPackagesKeepNoState(t *testing.T) {
	t.Parallel()
	enforce(t, packageState)
	reports(t, packageState, map[string]snippet{
		"a counter":              {text: "var count int"},
		"a client":               {text: "import \"net/http\"\nvar client = &http.Client{}"},
		"another's variable":     {text: "import \"os\"\nvar ErrOut = os.Stderr"},
		"a struct with a lock":   {text: "var shared = process{mu: new(sync.Mutex)}"},
		"a struct that points":   {text: "var shared = process{server: &server{}}"},
		"a zero struct":          {text: "var shared process"},
		"an exported table":      {text: "var Schedule = []int{5, 30}"},
		"a table that is filled": {text: "var seen = map[string]bool{}\nfunc f() { seen[\"x\"] = true }"},
		"a slice that grows":     {text: "var all = []int{}\nfunc f() { all = append(all, 1) }"},
		"a pointer to it":        {text: "var all = [2]int{}\nfunc f() *[2]int { return &all }"},
		"init":                   {text: "func init() {}"},
		"in a command":           {path: "cmd/demo/main.go", text: "var verbose bool"},
	})
	accepts(t, packageState, map[string]snippet{
		"a sentinel":            {text: "import \"errors\"\nvar ErrX = errors.New(\"x\")"},
		"a sentinel of another": {text: "import \"io/fs\"\nvar ErrX = fs.ErrNotExist"},
		"a pattern":             {text: "import \"regexp\"\nvar x = regexp.MustCompile(\"x\")"},
		"a table":               {text: "var names = []string{\"a\"}\nfunc f() string { return names[0] }"},
		"a struct of constants": {text: "var rates = faults{Late: 0.03, Every: 2 * time.Second}"},
		"an assertion":          {text: "var _ error = T{}"},
		"embedded files":        {text: "import \"embed\"\n//go:embed x\nvar files embed.FS"},
		"a method called init":  {text: "type t int\nfunc (t) init() {}"},
		"tests":                 {path: "relay/x_test.go", text: "var count int"},
	})
}
