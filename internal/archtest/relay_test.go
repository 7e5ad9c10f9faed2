package archtest

import (
	"go/ast"
	"testing"
)

// relayHolders finds the struct types with a field that is a *Relay, through which a part could write into any other one. A
// part gets the few things that it needs.
func relayHolders(files []*source) (violations []string) {
	for _, s := range files {
		if s.isTest() {
			continue
		}
		s.each(func(n ast.Node) {
			spec, ok := n.(*ast.TypeSpec)
			if !ok {
				return
			}
			fields, ok := spec.Type.(*ast.StructType)
			if !ok {
				return
			}
			for _, field := range fields.Fields.List {
				if s.isRelay(field.Type) {
					violations = append(violations, s.at(field, "%s holds a *Relay; give it the few things that it needs", spec.Name.Name))
				}
			}
		})
	}
	return violations
}

// isRelay reports whether a type is *Relay, in package relay or from outside.
func (s *source) isRelay(n ast.Expr) bool {
	pointer, ok := n.(*ast.StarExpr)
	if !ok {
		return false
	}
	if name, ok := pointer.X.(*ast.Ident); ok {
		return s.dir() == "relay" && name.Name == "Relay"
	}
	imported, name := s.qualified(pointer.X)
	return imported == relayPath && name == "Relay"
}

func TestNothingHoldsTheRelay(t *testing.T) {
	t.Parallel()
	enforce(t, relayHolders)
	reports(t, relayHolders, map[string]snippet{
		"a back-pointer":  {text: "type scanner struct {\n\trelay *Relay\n}"},
		"an embedded one": {text: "type scanner struct {\n\t*Relay\n}"},
		"a command":       {path: "cmd/demo/run.go", text: "import \"" + relayPath + "\"\ntype program struct {\n\trelay *relay.Relay\n}"},
	})
	accepts(t, relayHolders, map[string]snippet{
		"a receiver": {text: "func (r *Relay) f() {}"},
		"tests":      {path: "relay/x_test.go", text: "type running struct {\n\t*Relay\n}"},
	})
}
