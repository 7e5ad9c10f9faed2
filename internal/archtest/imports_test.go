package archtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
)

const (
	outboxPath   = module + "/outbox"
	relayPath    = module + "/relay"
	roomsPath    = module + "/internal/relay"
	consumerPath = module + "/consumer"
	webhookPath  = module + "/internal/webhook"
	comparePath  = module + "/internal/reconcile" // what both sides of a reconciliation share
	inboxSQLPath = module + "/internal/inboxsql"  // what receivers and the commands for an inbox run alike
	cliPath      = module + "/internal/cli"
	programPath  = module + "/cmd/outbox-relay"
	pgxModule    = "github.com/jackc/pgx/v5"
)

// A goPackage is what go list says of a package.
type goPackage struct {
	ImportPath string
	Standard   bool
	Imports    []string
	Deps       []string
}

// goCommand returns a call of go at the top of the repository, without the workspace: with the
// versions that are released.
func goCommand(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir, cmd.Env = root, append(os.Environ(), "GOWORK=off")
	return cmd
}

// list returns packages with, when deps is set, everything they need.
func list(t *testing.T, deps bool, patterns ...string) []goPackage {
	t.Helper()
	args := []string{"list", "-json=ImportPath,Standard,Imports,Deps"}
	if deps {
		args = append(args, "-deps")
	}
	out, err := goCommand(t, append(args, patterns...)...).Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("go list: %v\n%s", err, exit.Stderr)
		}
		t.Fatal(err)
	}
	var all []goPackage
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p goPackage
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

// within reports whether an import path is that of a package, or of one below it.
func within(imported, parent string) bool {
	return imported == parent || strings.HasPrefix(imported, parent+"/")
}

// The three meet in the database and on the wire, so that a producer does not carry the relay, nor
// the relay a receiver. The relay itself neither migrates nor starts a server.
func acquainted(all []goPackage) (violations []string) {
	three := []string{outboxPath, relayPath, consumerPath}
	for _, p := range all {
		if strings.HasPrefix(p.ImportPath, consumerPath+"/examples") { // programs
			continue
		}
		for _, own := range three {
			if !within(p.ImportPath, own) && !(own == relayPath && within(p.ImportPath, roomsPath)) {
				continue
			}
			for _, imported := range p.Imports {
				if own == relayPath && (within(imported, module+"/internal/localpg") || within(imported, "github.com/pressly/goose/v3")) {
					violations = append(violations, p.ImportPath+" must not import "+imported)
				}
			}
			for _, needed := range slices.Compact(slices.Sorted(slices.Values(slices.Concat(p.Deps, p.Imports)))) {
				if slices.ContainsFunc(three, func(other string) bool { return other != own && within(needed, other) }) {
					violations = append(violations, p.ImportPath+" must not depend on "+needed)
				}
			}
		}
	}
	return violations
}

func TestLibrariesDoNotKnowEachOther(t *testing.T) {
	t.Parallel()
	for _, violation := range acquainted(list(t, false, "./...")) {
		t.Error(violation)
	}
	for _, p := range []goPackage{
		{ImportPath: consumerPath, Imports: []string{outboxPath}},
		{ImportPath: relayPath, Deps: []string{webhookPath, consumerPath}},
		{ImportPath: roomsPath + "/ops", Imports: []string{consumerPath + "/breaker"}},
		{ImportPath: roomsPath + "/ops", Imports: []string{module + "/internal/localpg"}},
	} {
		if found := acquainted([]goPackage{p}); len(found) != 1 {
			t.Errorf("%+v: reported %q, want once", p, found)
		}
	}
	if found := acquainted([]goPackage{{ImportPath: module + "/cmd/demo", Imports: []string{outboxPath, consumerPath}}}); len(found) != 0 {
		t.Errorf("a command may know all: %q", found)
	}
}

// upward returns the imports of relay's rooms that do not lead downward. A room never needs package
// relay, which is made of rooms. Nothing of relay needs ops, which is for commands. Among the other
// rooms the compiler refuses cycles; policy stands on no other room.
func upward(all []goPackage) (violations []string) {
	const ops = roomsPath + "/ops"
	for _, p := range all {
		if p.ImportPath != relayPath && !within(p.ImportPath, roomsPath) {
			continue
		}
		bottom := p.ImportPath == roomsPath+"/policy"
		for _, imported := range p.Imports {
			if imported == relayPath || imported == ops || bottom && within(imported, roomsPath) {
				violations = append(violations, p.ImportPath+" must not import "+imported)
			}
		}
	}
	return violations
}

func TestRoomsImportDownward(t *testing.T) {
	t.Parallel()
	for _, violation := range upward(list(t, false, "./relay", "./internal/relay/...")) {
		t.Error(violation)
	}
	for _, p := range []goPackage{
		{ImportPath: roomsPath + "/ops", Imports: []string{relayPath}},
		{ImportPath: relayPath, Imports: []string{roomsPath + "/watch", roomsPath + "/ops"}},
		{ImportPath: roomsPath + "/watch", Imports: []string{roomsPath + "/ops"}},
		{ImportPath: roomsPath + "/policy", Imports: []string{roomsPath + "/identity"}},
	} {
		if found := upward([]goPackage{p}); len(found) != 1 {
			t.Errorf("%+v: reported %q, want once", p, found)
		}
	}
	if found := upward([]goPackage{{ImportPath: roomsPath + "/ops", Imports: []string{roomsPath + "/policy", roomsPath + "/archive"}}}); len(found) != 0 {
		t.Errorf("wrongly reported: %q", found)
	}
}

// shared are the packages that the rooms of the commands stand on, from the bottom up. Each imports
// only those before it.
var shared = []string{cliPath + "/output", cliPath, cliPath + "/config", cliPath + "/bulk"}

// crossed returns the imports between rooms of the commands, or into them from elsewhere than the
// program: a command that is changed in its room changes no other one.
func crossed(all []goPackage) (violations []string) {
	floor := func(path string) int {
		if i := slices.Index(shared, path); i >= 0 {
			return i
		}
		return len(shared) // a room
	}
	for _, p := range all {
		for _, imported := range p.Imports {
			if !within(imported, cliPath) || p.ImportPath == programPath {
				continue
			}
			if !within(p.ImportPath, cliPath) || floor(imported) >= floor(p.ImportPath) {
				violations = append(violations, p.ImportPath+" must not import "+imported)
			}
		}
	}
	return violations
}

func TestRoomsOfCommandsStandAlone(t *testing.T) {
	t.Parallel()
	for _, violation := range crossed(list(t, false, "./...")) {
		t.Error(violation)
	}
	for _, p := range []goPackage{
		{ImportPath: cliPath + "/bench", Imports: []string{cliPath + "/migrate"}},
		{ImportPath: cliPath, Imports: []string{cliPath + "/config"}},
		{ImportPath: cliPath + "/config", Imports: []string{cliPath + "/inbox"}},
		{ImportPath: module + "/internal/admin", Imports: []string{cliPath + "/output"}},
	} {
		if found := crossed([]goPackage{p}); len(found) != 1 {
			t.Errorf("%+v: reported %q, want once", p, found)
		}
	}
	for _, p := range []goPackage{
		{ImportPath: cliPath + "/inbox", Imports: []string{cliPath, cliPath + "/bulk", cliPath + "/output"}},
		{ImportPath: cliPath, Imports: []string{cliPath + "/output"}},
		{ImportPath: programPath, Imports: []string{cliPath, cliPath + "/inbox"}},
	} {
		if found := crossed([]goPackage{p}); len(found) != 0 {
			t.Errorf("wrongly reported: %q", found)
		}
	}
}

// heavy returns what a light package needs beyond the standard library, pgx with all that pgx
// itself needs, the two contracts with relays, and the statements that commands share.
func heavy(needed []goPackage, pgx map[string]bool) (violations []string) {
	light := []string{webhookPath, comparePath, inboxSQLPath}
	for _, p := range needed {
		switch {
		case p.ImportPath == outboxPath, slices.Contains(light, p.ImportPath), within(p.ImportPath, consumerPath):
			for _, imported := range p.Imports {
				if strings.Contains(imported, ".") && !within(imported, pgxModule) && !slices.Contains(light, imported) && !within(imported, consumerPath) {
					violations = append(violations, fmt.Sprintf("%s imports %s", p.ImportPath, imported))
				}
			}
		default:
			if !p.Standard && !pgx[p.ImportPath] {
				violations = append(violations, "the libraries' users would need "+p.ImportPath)
			}
		}
	}
	return violations
}

func TestLibrariesAreLight(t *testing.T) {
	t.Parallel()
	pgx := map[string]bool{}
	for _, p := range list(t, true, pgxModule, pgxModule+"/pgxpool", pgxModule+"/stdlib") {
		pgx[p.ImportPath] = true
	}
	for _, violation := range heavy(list(t, true, "./outbox", "./consumer", "./consumer/inbox", "./consumer/sqlconsumer", "./consumer/store"), pgx) {
		t.Error(violation)
	}
	const zerolog, text = "github.com/rs/zerolog", "golang.org/x/text/unicode/norm"
	for name, needed := range map[string][]goPackage{
		"a direct import":                    {{ImportPath: outboxPath, Imports: []string{"context", text}}},
		"an indirect one":                    {{ImportPath: zerolog}},
		"the relay's migrations, with goose": {{ImportPath: consumerPath, Imports: []string{module + "/migrations"}}},
	} {
		if found := heavy(needed, pgx); len(found) != 1 {
			t.Errorf("%s: reported %q, want once", name, found)
		}
	}
	lawful := []goPackage{{ImportPath: consumerPath, Imports: []string{"net/http", pgxModule, pgxModule + "/pgxpool", webhookPath}}, {ImportPath: text}}
	if found := heavy(lawful, pgx); len(found) != 0 {
		t.Errorf("wrongly reported: %q", found)
	}
}

// bound returns the imports by which a module below the root, which others require at a version of
// its own, would need the root at one version: those of internal packages. Programs, tests, and
// what is internal itself are built at one commit.
func bound(modules []string) check {
	return func(files []*source) (violations []string) {
		for _, s := range files {
			in := slices.IndexFunc(modules, func(dir string) bool { return within(s.path, dir) })
			if in < 0 || s.isTest() || within(s.path, "cmd") || strings.Contains("/"+s.path, "/internal/") {
				continue
			}
			for _, spec := range s.file.Imports {
				imported := unquote(spec.Path)
				if within(imported, module) && strings.Contains(imported, "/internal/") && !within(imported, module+"/"+modules[in]) {
					violations = append(violations, s.at(spec, "a module with its own version must not import %s", imported))
				}
			}
		}
		return violations
	}
}

func TestModulesDoNotNeedInternalPackagesOfTheRoot(t *testing.T) {
	t.Parallel()
	var modules []string
	for _, name := range tree(t) {
		if path.Base(name) == "go.mod" && name != "go.mod" {
			modules = append(modules, path.Dir(name))
		}
	}
	enforce(t, bound(modules))
	reader := `import "github.com/outbox-relay/outbox-relay/consumer/internal/message"`
	reports(t, bound(modules), map[string]snippet{"an internal package": {path: "consumer/redisstore/x.go", text: reader}})
	accepts(t, bound(modules), map[string]snippet{
		"a test":          {path: "consumer/redisstore/x_test.go", text: reader},
		"the root module": {path: "consumer/kafkaconsumer/x.go", text: reader},
		"a program":       {path: "cmd/demo-cluster/x.go", text: reader},
		"a public one":    {path: "consumer/redisstore/x.go", text: `import "github.com/outbox-relay/outbox-relay/consumer/store"`},
		"its own":         {path: "consumer/redisstore/x.go", text: `import "github.com/outbox-relay/outbox-relay/consumer/redisstore/internal/x"`},
	})
}
