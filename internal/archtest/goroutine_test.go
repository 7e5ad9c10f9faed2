package archtest

import (
	"go/ast"
	"testing"
)

// In the libraries sync.WaitGroup.Go starts every goroutine: unlike the statement it leaves
// something to wait on, and a test for leaks that fails tells who forgot to. Commands own their
// process and may use the statement.
func unawaited(files []*source) (violations []string) {
	for dir, sources := range packages(files) {
		waited := map[string]bool{}
		for _, s := range sources {
			s.each(func(n ast.Node) {
				if owner, method := methodCall(n); method == "Wait" {
					waited[owner] = true
				}
			})
		}
		for _, s := range sources {
			if !s.isLibrary() {
				continue
			}
			s.each(func(n ast.Node) {
				if _, ok := n.(*ast.GoStmt); ok {
					violations = append(violations, s.at(n, "start goroutines with sync.WaitGroup.Go, and wait for them"))
				}
				owner, method := methodCall(n)
				switch imported, name := s.qualified(n); {
				case method == "Go" && dir == "outbox":
					violations = append(violations, s.at(n, "outbox starts no goroutine"))
				case method == "Go" && !waited[owner]:
					violations = append(violations, s.at(n, "nothing in this package calls %s.Wait", owner))
				case dir == "outbox" && (ban{"time": {"AfterFunc"}, "context": {"AfterFunc"}}).has(imported, name):
					violations = append(violations, s.at(n, "outbox starts no goroutine, and %s.%s runs in one", imported, name))
				}
			})
		}
	}
	return violations
}

// methodCall returns, for a call such as r.senders.Wait(), "senders" and "Wait".
func methodCall(n ast.Node) (owner, method string) {
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return "", ""
	}
	selector, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return "", ""
	}
	switch x := selector.X.(type) {
	case *ast.Ident:
		owner = x.Name
	case *ast.SelectorExpr:
		owner = x.Sel.Name
	}
	return owner, selector.Sel.Name
}

func TestGoroutinesAreAwaited(t *testing.T) {
	t.Parallel()
	enforce(t, unawaited)
	reports(t, unawaited, map[string]snippet{
		"a go statement":                {text: "func f() { go f() }"},
		"one in a nested function":      {path: "consumer/router.go", text: "func f() { func() { go f() }() }"},
		"a group without a wait":        {text: "func f() { var wg sync.WaitGroup; wg.Go(f) }"},
		"another group is waited for":   {text: "func (r *relay) f() { r.senders.Go(f); r.takers.Wait() }"},
		"a group in outbox":             {path: "outbox/batch.go", text: "func f() { var wg sync.WaitGroup; wg.Go(f); wg.Wait() }"},
		"a timer's goroutine in outbox": {path: "outbox/batch.go", text: "import \"time\"\nfunc f() { time.AfterFunc(1, f) }"},
	})
	accepts(t, unawaited, map[string]snippet{
		"a group with its wait": {text: "func f() { var wg sync.WaitGroup; wg.Go(f); wg.Wait() }"},
		"tests":                 {path: "relay/claim_test.go", text: "func f() { go f() }"},
		"commands":              {path: "cmd/demo/main.go", text: "func f() { go f() }"},
	})
}
