package archtest

import (
	"go/ast"
	"go/token"
	"regexp"
	"strings"
	"testing"
)

// sqlPattern finds SQL in a text. Keywords count in capitals, as this repository writes them, and
// in small letters where prose would not put them side by side.
var sqlPattern = regexp.MustCompile(`(?m)^\s*(SELECT|INSERT|UPDATE|DELETE|WITH|LISTEN|UNLISTEN|NOTIFY|LOCK|SET|TRUNCATE|CREATE|ALTER|DROP|CALL|COPY|GRANT)\s` +
	`|\b(SELECT\s.*\sFROM|INSERT INTO|DELETE FROM|UPDATE\s+\w+\s+SET)\b` +
	`|\b(insert into|delete from|select\s+\S+\s+from|update\s+\w+\s+set)\s`)

// isSQLFile reports whether a file of a library may hold SQL.
func isSQLFile(s *source) bool {
	switch dir := s.dir(); {
	case dir == "outbox":
		return s.base() == "enqueue.go" || strings.HasPrefix(s.base(), "enqueue_")
	case s.isEngine(), dir == "internal/inboxops", dir == "internal/inboxsql", strings.HasPrefix(dir, "internal/reconcile"), dir == "consumer/inbox", dir == "consumer/internal/memory": // each room owns its SQL
		return s.base() == "store.go" || strings.HasPrefix(s.base(), "store_")
	}
	return false
}

// SQL stands in one place per package, each statement as a constant, so that a reviewer of the
// schema finds all that runs against it.
func strayedSQL(files []*source) (violations []string) {
	for _, s := range files {
		if !s.isLibrary() {
			continue
		}
		constant := map[ast.Node]bool{}
		for _, decl := range s.file.Decls {
			if group, ok := decl.(*ast.GenDecl); ok && group.Tok == token.CONST {
				ast.Inspect(group, func(n ast.Node) bool {
					constant[n] = true
					return true
				})
			}
		}
		s.each(func(n ast.Node) {
			literal, ok := n.(*ast.BasicLit)
			if !ok || literal.Kind != token.STRING || !sqlPattern.MatchString(unquote(literal)) {
				return
			}
			switch {
			case !isSQLFile(s):
				violations = append(violations, s.at(n, "SQL stands in store*.go and enqueue.go only"))
			case !constant[n]:
				violations = append(violations, s.at(n, "SQL is a constant above the method that runs it"))
			}
		})
	}
	return violations
}

func TestSQLStandsInItsPlace(t *testing.T) {
	t.Parallel()
	enforce(t, strayedSQL)
	reports(t, strayedSQL, map[string]snippet{
		"a query in the wrong file":   {path: "relay/claim.go", text: "const q = `\nSELECT id FROM outbox`"},
		"a select of several lines":   {path: "relay/claim.go", text: "const q = `\n  WITH x AS (\nSELECT 1) TABLE x`"},
		"a query of a room":           {path: "internal/relay/ops/bulk.go", text: "const q = `\nSELECT id FROM outbox`"},
		"an update":                   {path: "consumer/middleware.go", text: `const q = "UPDATE processed_events SET attempts = 2"`},
		"a listen":                    {path: "relay/wake.go", text: `func f() { exec("LISTEN outbox_wake") }`},
		"small letters":               {path: "outbox/batch.go", text: `const q = "insert into outbox (id) values (1)"`},
		"a session setting":           {path: "internal/relay/session.go", text: `func f() { exec("SET enable_seqscan = off") }`},
		"an inline statement":         {path: "internal/relay/ops/store.go", text: `func f() { exec("DELETE FROM outbox_relay") }`},
		"a variable":                  {path: "relay/store.go", text: `var q = "DELETE FROM outbox_relay"`},
		"a constant within functions": {path: "consumer/inbox/store.go", text: "func f() { const q = `SELECT 1 FROM x` }"},
	})
	accepts(t, strayedSQL, map[string]snippet{
		"the store":            {path: "relay/store_claim.go", text: "const q = `\nSELECT id FROM outbox`"},
		"a room's store":       {path: "internal/relay/ops/store_bulk.go", text: "const q = `\nSELECT id FROM outbox`"},
		"the producer's":       {path: "outbox/enqueue.go", text: "const q = `INSERT INTO outbox DEFAULT VALUES`"},
		"the receiver's":       {path: "consumer/internal/memory/store.go", text: "const q = `LOCK TABLE processed_events`"},
		"prose":                {path: "relay/config.go", text: `const s = "select a destination, set a timeout and update the file; INSERT is a right"`},
		"a comment":            {path: "relay/claim.go", text: "// SELECT id FROM outbox\nconst a = 1"},
		"tests":                {path: "relay/claim_test.go", text: `const q = "DELETE FROM outbox_relay"`},
		"commands":             {path: "cmd/demo/schema.go", text: `const q = "DELETE FROM outbox_relay"`},
		"an end of a sentence": {path: "relay/config.go", text: `const s = "with them, SELECT is enough"`},
	})
}
