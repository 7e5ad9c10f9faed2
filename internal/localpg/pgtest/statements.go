package pgtest

import (
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

const module = "github.com/outbox-relay/outbox-relay/"

// Statements returns the constants of packages that begin as statements do that read or write, by
// their names. root is the directory of the module, and packages are directories below it.
func Statements(t testing.TB, root string, packages ...string) map[string]string {
	t.Helper()
	constants := constants{root: root, files: token.NewFileSet(), done: map[string]*types.Package{}}
	found := map[string]string{}
	for _, name := range packages {
		pkg, err := constants.Import(module + name)
		Must(t, err)
		for _, name := range pkg.Scope().Names() {
			c, is := pkg.Scope().Lookup(name).(*types.Const)
			if !is || c.Val().Kind() != constant.String {
				continue
			}
			text := constant.StringVal(c.Val())
			switch first, _, _ := strings.Cut(strings.TrimSpace(text), " "); first {
			case "SELECT", "INSERT", "UPDATE", "DELETE", "WITH":
				found[pkg.Path()[len(module):]+"."+name] = text
			}
		}
	}
	return found
}

// constants imports what is needed to evaluate constants of this module: its packages, and of
// others no more than that they are there.
type constants struct {
	root  string
	files *token.FileSet
	done  map[string]*types.Package
}

func (c constants) Import(name string) (*types.Package, error) {
	if pkg := c.done[name]; pkg != nil {
		return pkg, nil
	}
	dir, ours := strings.CutPrefix(name, module)
	if !ours {
		return types.NewPackage(name, path.Base(name)), nil
	}
	names, err := filepath.Glob(filepath.Join(c.root, dir, "*.go"))
	if err != nil {
		return nil, err
	}
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(c.files, name, nil, 0)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
	}
	config := types.Config{Importer: c, Error: func(error) {}} // most of other packages is unknown
	pkg, _ := config.Check(name, c.files, files, nil)
	c.done[name] = pkg
	return pkg, nil
}
