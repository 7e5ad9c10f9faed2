package archtest

import (
	"go/ast"
	"testing"
)

// holders are the types that still hold a *Relay, through which they could write into any other part. The list may only
// shrink: a part gets the few things that it needs.
var holders = map[string]bool{
	"relay.session": true,
}

// relayHolders finds the struct types with a field that is a *Relay.
func relayHolders(files []*source) (violations []string) {
	found := map[string]bool{}
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
				if !s.isRelay(field.Type) {
					continue
				}
				key := s.dir() + "." + spec.Name.Name
				found[key] = true
				if !holders[key] {
					violations = append(violations, s.at(field, "%s holds a *Relay; give it the few things that it needs", spec.Name.Name))
				}
			}
		})
	}
	if len(packages(files)) > 1 { // the whole repository
		for key := range holders {
			if !found[key] {
				violations = append(violations, key+": is excepted but holds no *Relay any more; strike it from the list")
			}
		}
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
		"a receiver":     {text: "func (r *Relay) f() {}"},
		"a known holder": {text: "type claimer struct {\n\trelay *Relay\n}"},
		"tests":          {path: "relay/x_test.go", text: "type running struct {\n\t*Relay\n}"},
	})
}
