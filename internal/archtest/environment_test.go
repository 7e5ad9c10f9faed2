package archtest

import (
	"go/ast"
	"strings"
	"testing"
)

// surroundings are what a program reads besides its arguments: environment, flags and files, in their own names and in
// those of functions that read them unasked (pgx takes PGHOST and ~/.pgpass, net/http a proxy). A package that read them
// would do in a test, a container or another program what was not configured.
var surroundings = ban{
	"flag": {"*"},
	"os": {
		"Getenv", "LookupEnv", "Environ", "ExpandEnv", "Setenv", "Unsetenv", "Clearenv", "Args", "Stdin",
		"Open*", "Create*", "ReadFile", "ReadDir", "WriteFile", "Mkdir*", "Remove*", "Rename", "Stat", "Lstat", "Root", "DirFS", "Getwd", "UserHomeDir",
	},
	"io/ioutil":            {"*"},
	pgxModule:              {"Connect", "ConnectWithOptions", "ParseConfig*"},
	pgxModule + "/pgxpool": {"New", "ParseConfig"},
	pgxModule + "/pgconn":  {"Connect", "ConnectWithOptions", "ParseConfig*"},
	"database/sql":         {"Open"},
	"net/http":             {"ProxyFromEnvironment", "DefaultTransport", "DefaultClient", "Get", "Head", "Post", "PostForm"},
}

// exempt may read what they name, for the reason given.
var exempt = map[string]string{
	"consumer/examples/":    "programs, as those of cmd are",
	"internal/bench/":       "a program, as those of cmd are",
	"internal/cli/":         "the commands of cmd/outbox-relay, which alone imports it",
	"internal/localpg/":     "runs PostgreSQL's programs on a directory of its own; only tests, benchmarks and the demo import it",
	"internal/notify/":      "replaces http.DefaultTransport, with which the library's services send, by the guarded one",
	"internal/procstat/":    "reads /proc for bench and for make bench; no library imports it",
	"internal/settings/":    "reads the configuration of outbox-relay; internal/cli alone imports it",
	"internal/relaytest/":   "runs relays on configurations of their own; only tests import it",
	"internal/process/":     "runs other programs; only demonstrations import it",
	"internal/localserver/": "runs other servers on a directory of its own; only tests import it",
	"internal/localnats/":   "runs NATS servers on directories of their own; only tests and the demo import it",
}

func readsSurroundings(files []*source) (violations []string) {
	for _, s := range files {
		if s.isTest() || s.inCmd() || isExempt(s.path) {
			continue
		}
		s.each(func(n ast.Node) {
			if imported, name := s.qualified(n); surroundings.has(imported, name) {
				violations = append(violations, s.at(n, "%s.%s: environment, flags and files are read in cmd only; take a Config", importName(imported), name))
			}
		})
	}
	return violations
}

func isExempt(path string) bool {
	for prefix := range exempt {
		if strings.HasPrefix(path, prefix) {
			return true
		}
	}
	return false
}

func TestOnlyCommandsReadTheirSurroundings(t *testing.T) {
	t.Parallel()
	enforce(t, readsSurroundings)
	reports(t, readsSurroundings, map[string]snippet{
		"environment":          {text: "import \"os\"\nvar x = os.Getenv(\"X\")"},
		"under another name":   {path: "consumer/config.go", text: "import system \"os\"\nfunc f() { system.LookupEnv(\"X\") }"},
		"flags":                {path: "internal/admin/admin.go", text: "import \"flag\"\nvar x = flag.Bool(\"x\", false, \"\")"},
		"a file":               {path: "migrations/embed.go", text: "import \"os\"\nfunc f() { os.OpenFile(\"x\", 0, 0) }"},
		"pgx's environment":    {text: "import \"github.com/jackc/pgx/v5/pgxpool\"\nfunc f() { pgxpool.New(ctx, url) }"},
		"the proxy of the day": {text: "import \"net/http\"\nfunc f() { http.DefaultClient.Do(nil) }"},
	})
	accepts(t, readsSurroundings, map[string]snippet{
		"commands":       {path: "cmd/demo/main.go", text: "import \"os\"\nvar x = os.Getenv(\"X\")"},
		"tests":          {path: "relay/x_test.go", text: "import \"os\"\nvar x = os.Getenv(\"X\")"},
		"a local called": {text: "func f(os config) { _ = os.Getenv }"},
		"a given config": {text: "import \"github.com/jackc/pgx/v5/pgxpool\"\nfunc f() { pgxpool.NewWithConfig(ctx, cfg) }"},
	})
}
