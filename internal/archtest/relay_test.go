package archtest

import (
	"fmt"
	"go/ast"
	"testing"
)

// relayHolders finds the struct types with a field that is a *Relay, through which a part could
// write into any other one. A part gets the few things that it needs.
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

// sharedWholes finds the struct types of the engine that several others embed and that hold other
// structs of their package. Through such a type, whatever its name, each part reaches into every
// other one. A part gets the few things that it needs.
func sharedWholes(files []*source) (violations []string) {
	for _, sources := range packages(files) {
		structs, embedders := map[string]*ast.StructType{}, map[string]int{}
		for _, s := range sources {
			if s.isTest() || !s.isEngine() {
				continue
			}
			s.each(func(n ast.Node) {
				spec, ok := n.(*ast.TypeSpec)
				if !ok {
					return
				}
				if fields, ok := spec.Type.(*ast.StructType); ok {
					structs[spec.Name.Name] = fields
					for _, field := range fields.Fields.List {
						if len(field.Names) == 0 {
							embedders[localType(field)]++
						}
					}
				}
			})
		}
		for name, n := range embedders {
			if n < 2 || structs[name] == nil {
				continue
			}
			for _, field := range structs[name].Fields.List {
				if held := localType(field); structs[held] != nil {
					violations = append(violations, fmt.Sprintf("%s: %d structs embed %s, which holds %s; give each the few things that it needs",
						sources[0].dir(), n, name, held))
					break
				}
			}
		}
	}
	return violations
}

// localType returns the name of a field's type, or of what it points to, in its own package; empty:
// it is another kind of type.
func localType(field *ast.Field) string {
	of := field.Type
	if pointer, ok := of.(*ast.StarExpr); ok {
		of = pointer.X
	}
	if name, ok := of.(*ast.Ident); ok {
		return name.Name
	}
	return ""
}

func TestPartsShareNoWhole(t *testing.T) {
	t.Parallel()
	enforce(t, sharedWholes)
	const parts = "type lanes struct{}\ntype store struct{}\n"
	reports(t, sharedWholes, map[string]snippet{
		"pointers": {text: parts + "type core struct {\n\tlanes *lanes\n\tstore *store\n}\ntype claimer struct {\n\t*core\n}\ntype Relay struct {\n\tcore\n}"},
	})
	accepts(t, sharedWholes, map[string]snippet{
		"what a single type is made of": {text: parts + "type outgoing struct {\n\tstore *store\n}\ntype lane struct {\n\toutgoing\n}"},
		"values":                        {text: "type phases struct {\n\ttaking, doing context.Context\n}\ntype senders struct {\n\t*phases\n}\ntype Relay struct {\n\tphases\n}"},
	})
}
