package archtest

import (
	"fmt"
	"go/ast"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// upwardUses is how many uses in package relay may lead up. Make it smaller, never larger.
const upwardUses = 40

// fileList is one line of the list in relay/doc.go: files, then what is in them.
var fileList = regexp.MustCompile(`(?m)^//\t((?:[a-z_*]+\.go(?:, )?)+)  `)

// readingOrder returns the files of package relay in the order in which its doc.go names them.
func readingOrder(doc string) (order []string) {
	for _, line := range fileList.FindAllStringSubmatch(doc, -1) {
		order = append(order, strings.Split(line[1], ", ")...)
	}
	return order
}

// usesUpward returns the uses of names that are declared in a file before the one that uses them, and the files that the
// order does not name. Methods and fields do not count.
func usesUpward(files []*source, order []string) (uses, unnamed []string) {
	place := func(s *source) int {
		if i := slices.Index(order, s.base()); i >= 0 {
			return i
		}
		return slices.IndexFunc(order, func(pattern string) bool { ok, _ := path.Match(pattern, s.base()); return ok })
	}
	declared := map[string]int{}
	for _, s := range files {
		if place(s) < 0 {
			unnamed = append(unnamed, s.path+": is not in the reading order of doc.go")
		}
		for name, object := range s.file.Scope.Objects {
			if object != nil {
				declared[name] = place(s)
			}
		}
	}
	for _, s := range files {
		keys := map[*ast.Ident]bool{} // of composite literals: fields
		s.each(func(n ast.Node) {
			if pair, ok := n.(*ast.KeyValueExpr); ok {
				if key, ok := pair.Key.(*ast.Ident); ok {
					keys[key] = true
				}
			}
		})
		for _, name := range s.file.Unresolved {
			if at, ok := declared[name.Name]; ok && !keys[name] && place(s) >= 0 && at >= 0 && at < place(s) {
				uses = append(uses, s.at(name, "uses %s of %s", name.Name, order[at]))
			}
		}
	}
	return uses, unnamed
}

func TestRelayIsReadFromTheTopDown(t *testing.T) {
	t.Parallel()
	var files []*source
	for _, s := range repository(t) {
		if s.dir() == "relay" && !s.isTest() && s.base() != "doc.go" {
			files = append(files, s)
		}
	}
	uses, unnamed := usesUpward(files, readingOrder(read(t, "relay/doc.go")))
	for _, violation := range unnamed {
		t.Error(violation)
	}
	t.Logf("%d uses lead up", len(uses))
	if len(uses) > upwardUses {
		t.Errorf("%d uses lead up, at most %d are allowed:\n%s", len(uses), upwardUses, strings.Join(uses, "\n"))
	}

	a := parse(t, "relay/a.go", "package relay\ntype top struct{ field int }\nvar x = bottom{}")
	b := parse(t, "relay/b_c.go", "package relay\ntype bottom struct{ top int }\nvar y = []any{top{}, bottom{top: 1}}")
	order := readingOrder("//\ta.go, z.go  x\n//\tb_*.go  y\n")
	if uses, unnamed := usesUpward([]*source{a, b}, order); fmt.Sprint(order) != "[a.go z.go b_*.go]" || len(uses) != 1 || len(unnamed) != 0 {
		t.Errorf("order %q, uses %q, unnamed %q", order, uses, unnamed)
	}
	if _, unnamed := usesUpward([]*source{a, b}, order[:1]); len(unnamed) != 1 {
		t.Errorf("unnamed %q", unnamed)
	}
}
