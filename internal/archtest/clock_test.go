package archtest

import (
	"go/ast"
	"slices"
	"strings"
	"testing"
)

// decisions are the files, and the directories, whose functions decide from what they are given:
// the same input, the same outcome. They take now as a parameter, so that a table can test every
// moment.
var decisions = []string{
	"internal/relay/policy/", "internal/relay/agenda/", "internal/relay/capacity/", "internal/relay/ordering/", "internal/relay/alert/decide.go", "internal/relay/intake/routes.go", "internal/relay/intake/rules.go",
	"consumer/internal/memory/freshness.go", "consumer/inbox/retry.go",
	"consumer/breaker/breaker.go",
	"internal/webhook/sign.go", "internal/webhook/verify.go",
}

var clock = ban{"time": {"Now", "Since", "Until", "After", "AfterFunc", "Tick", "NewTimer", "NewTicker", "Sleep"}}

func clockInDecisions(files []*source) (violations []string) {
	for _, s := range files {
		if s.isTest() || !slices.ContainsFunc(decisions, func(prefix string) bool { return strings.HasPrefix(s.path, prefix) }) {
			continue
		}
		s.each(func(n ast.Node) {
			if imported, name := s.qualified(n); clock.has(imported, name) {
				violations = append(violations, s.at(n, "decisions take now as a parameter instead of calling time.%s", name))
			}
		})
	}
	return violations
}

func TestDecisionsTakeNow(t *testing.T) {
	t.Parallel()
	enforce(t, clockInDecisions)
	reports(t, clockInDecisions, map[string]snippet{
		"now":    {path: "internal/relay/policy/retry.go", text: "import \"time\"\nvar x = time.Now()"},
		"a room": {path: "internal/relay/policy/flow.go", text: "import \"time\"\nvar x = time.Now()"},
		"since":  {path: "internal/relay/policy/classify.go", text: "import clock \"time\"\nfunc f(t clock.Time) { _ = clock.Since(t) }"},
	})
	accepts(t, clockInDecisions, map[string]snippet{
		"the parameter":   {path: "internal/relay/policy/retry.go", text: "import \"time\"\nfunc f(now time.Time) { _ = now.Add(time.Second) }"},
		"a measurement":   {path: "relay/deliver.go", text: "import \"time\"\nvar x = time.Now()"},
		"another package": {path: "internal/relay/policy/retry.go", text: "import \"example.com/time2\"\nvar x = time2.Now()"},
	})
}

// statementMethods are those that take a statement's arguments.
var statementMethods = []string{"Exec", "ExecContext", "Query", "QueryContext", "QueryRow", "QueryRowContext", "Queue", "Structs", "Values", "Value", "exec", "query", "queryRow"}

// The database's clock decides: now() in SQL. A time of this process in a statement would compare
// two clocks. A duration is fine, because it is a measurement of one.
func clockInStatements(files []*source) (violations []string) {
	for _, s := range files {
		if !s.isLibrary() {
			continue
		}
		s.each(func(n ast.Node) {
			function, ok := n.(*ast.FuncDecl)
			if !ok || function.Body == nil {
				return
			}
			local := map[string]bool{} // variables that hold a time of this process
			ast.Inspect(function.Body, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.AssignStmt:
					for i, value := range n.Rhs {
						if name, ok := n.Lhs[min(i, len(n.Lhs)-1)].(*ast.Ident); ok && s.isLocalTime(value, local) {
							local[name.Name] = true
						}
					}
				case *ast.CallExpr:
					if _, method := methodCall(n); !slices.Contains(statementMethods, method) {
						break
					}
					for _, argument := range n.Args {
						if s.isLocalTime(argument, local) {
							violations = append(violations, s.at(argument, "the database's clock decides: write now() in the statement"))
						}
					}
				}
				return true
			})
		})
	}
	return violations
}

// isLocalTime reports whether an expression is time.Now(), a variable that holds it, or a time made
// from either.
func (s *source) isLocalTime(n ast.Expr, local map[string]bool) bool {
	switch n := n.(type) {
	case *ast.Ident:
		return local[n.Name]
	case *ast.CallExpr:
		if imported, name := s.qualified(n.Fun); imported == "time" && name == "Now" {
			return true
		}
		selector, ok := n.Fun.(*ast.SelectorExpr)
		return ok && slices.Contains([]string{"Add", "AddDate", "UTC", "In", "Round", "Truncate", "Format"}, selector.Sel.Name) &&
			s.isLocalTime(selector.X, local)
	}
	return false
}

func TestStatementsUseTheDatabasesClock(t *testing.T) {
	t.Parallel()
	enforce(t, clockInStatements)
	reports(t, clockInStatements, map[string]snippet{
		"now":        {text: "import \"time\"\nfunc f() { tx.Exec(ctx, q, time.Now()) }"},
		"a variable": {text: "import \"time\"\nfunc f() { now := time.Now(); pool.QueryRow(ctx, q, id, now) }"},
		"later":      {text: "import \"time\"\nfunc f() { now := time.Now(); due := now.Add(d).UTC(); batch.Queue(q, due) }"},
	})
	accepts(t, clockInStatements, map[string]snippet{
		"a duration":            {text: "import \"time\"\nfunc f() { now := time.Now(); tx.Exec(ctx, q, now.Sub(started).Seconds()) }"},
		"a time from elsewhere": {text: "func f() { tx.Exec(ctx, q, event.AvailableAt) }"},
	})
}
