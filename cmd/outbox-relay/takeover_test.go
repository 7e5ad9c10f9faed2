package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli/destinations"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A relayProcess is outbox-relay run as a process of its own.
type relayProcess struct {
	started
	program *exec.Cmd
}

// launch starts a relay in a folder, with nothing but these variables, and waits until it works.
func launch(t testing.TB, dir string, env ...string) *relayProcess {
	t.Helper()
	return launchAs(t, dir, []string{"run", "--poll-interval=1s"}, env...)
}

// launchAs does so with these arguments.
func launchAs(t testing.TB, dir string, args []string, env ...string) *relayProcess {
	t.Helper()
	p := &relayProcess{
		started: started{stderr: &awaited{written: make(chan struct{}, 1)}, code: make(chan int, 1)},
		program: exec.CommandContext(t.Context(), os.Args[0], args...),
	}
	p.program.Dir, p.program.Env, p.program.Stderr = dir, append([]string{asProgram + "=1"}, env...), p.stderr
	if err := p.program.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.program.Wait()
		p.code <- p.program.ProcessState.ExitCode()
	}()
	p.stderr.wait(t, `"registered"`, p.code)
	return p
}

func (p *relayProcess) signal(t testing.TB, s syscall.Signal) {
	t.Helper()
	if err := p.program.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// stop ends the relay as an orchestrator does.
func (p *relayProcess) stop(t testing.TB) {
	t.Helper()
	p.signal(t, syscall.SIGTERM)
	if code := <-p.code; code != 0 {
		t.Errorf("exit code %d, stderr:\n%s", code, p.stderr)
	}
}

func (p *relayProcess) kill(t testing.TB) {
	t.Helper()
	p.signal(t, syscall.SIGKILL)
	<-p.code
}

// reloads sends SIGHUP and waits for the line that says what became of it.
func (p *relayProcess) reloads(t *testing.T, text string) {
	t.Helper()
	before := len(p.stderr.String())
	p.signal(t, syscall.SIGHUP)
	p.stderr.waitBehind(t, before, text, p.code)
}

// A destinationServer counts by path and key what arrives.
type destinationServer struct {
	*httptest.Server
	mu       sync.Mutex
	received map[string]int
}

func newDestinationServer(t *testing.T) *destinationServer {
	s := &destinationServer{received: map[string]int{}}
	s.Server = httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.received[r.URL.Path+" "+r.Header.Get("X-Idempotency-Key")]++
	}))
	t.Cleanup(s.Close)
	return s
}

// awaitUntil waits until a condition holds that neither a log line nor a channel tells of.
func awaitUntil(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for range 600 {
		if holds() {
			return
		}
		<-time.After(100 * time.Millisecond)
	}
	t.Fatalf("never came: %s", what)
}

// expect waits until each of the entries arrived.
func (s *destinationServer) expect(t *testing.T, entries ...string) {
	t.Helper()
	for _, entry := range entries {
		awaitUntil(t, entry, func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.received[entry] > 0
		})
	}
}

const allRoutes = "SELECT coalesce(string_agg(pattern || ' ' || destination, ', ' ORDER BY pattern, destination), '') FROM outbox_route"

// A person starts a relay for a moment in another folder, where nothing but OUTBOX_DESTINATION_URL says where to deliver.
// The real one keeps its routes, everybody can see what happened, and what was left behind has a remedy.
func TestRelayFromAnotherFolder(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	server := newDestinationServer(t)
	database := "OUTBOX_DATABASE_URL=" + dsn
	env := []string{database}
	folder := t.TempDir()
	writeFile(t, filepath.Join(folder, usualFile), fmt.Sprintf(`
destinations: {logistics: {url: '%[1]s/logistics'}, analytics: {url: '%[1]s/analytics'}}
routes: [{event: 'invoice.*', to: [logistics, analytics]}, {event: 'audit.*', to: [analytics]}]
alerts: {channels: [{webhook: '%[1]s/alerts'}]}
`, server.URL))
	const routes = "audit.* analytics, invoice.* analytics, invoice.* logistics"
	enqueue := func(key string) {
		t.Helper()
		execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('invoice.paid', '{}', $1)", key)
	}
	status := func() string {
		t.Helper()
		r := command(env, "status")
		if r.code != 0 {
			t.Fatalf("%+v", r)
		}
		return r.stdout
	}
	stored := func(when, want string) {
		t.Helper()
		if got := query[string](t, db, allRoutes); got != want {
			t.Errorf("%s the routes are %q, want %q", when, got, want)
		}
	}

	// 1. The real relay works.
	relay := launch(t, folder, database, "OUTBOX_NAME=billing")
	enqueue("before")
	server.expect(t, "/logistics before", "/analytics before")
	awaitUntil(t, "all is well", func() bool { return strings.HasSuffix(status(), "\nAll is well.\n") })

	// 2. Another one starts, and adds its route. It takes none.
	other := launch(t, t.TempDir(), database, "OUTBOX_NAME=laptop", "OUTBOX_DESTINATION_URL=http://127.0.0.1:1/in")
	stored("beside the other relay", "* default, "+routes)
	enqueue("during")
	server.expect(t, "/logistics during", "/analytics during")

	// 3. The real one's log, its alert and every command say so.
	relay.stderr.wait(t, `"msg":"route added by another relay or by hand"`, relay.code)
	server.expect(t, "/alerts ")
	for _, text := range []string{"\n  routes_changed ", "relay \"laptop\"", "changed, and not every running relay is configured with them", "\n  outbox-relay routes list\n"} {
		if got := status(); !strings.Contains(got, text) {
			t.Errorf("status does not say %q:\n%s", text, got)
		}
	}
	list := command(env, "routes", "list").stdout
	for _, line := range []string{"*          default      1        laptop (2)\n", "invoice.*  logistics    0        billing (1)\n"} {
		if !strings.Contains(list, line) {
			t.Errorf("routes list does not say %q:\n%s", line, list)
		}
	}
	if got := command(env, "relays").stdout; !strings.Contains(got, "  analytics, logistics\n") || !strings.Contains(got, "  default\n") {
		t.Errorf("relays says\n%s", got)
	}

	// 4. It stops. Its route goes with it; what waits for its destination is unserved, and can be given up.
	other.stop(t)
	stored("after the other relay", routes)
	relay.stderr.wait(t, `"msg":"route removed by another relay or by hand"`, relay.code)
	if got := status(); !strings.Contains(got, "  unserved") || !strings.Contains(got, "1 delivery is unserved: no running relay has \"default\". Add it to a relay's configuration and reload that relay (SIGHUP), or give them up.\n  outbox-relay discard --destination default --status pending") {
		t.Errorf("status says\n%s", got)
	}
	const why = "\n  default: unserved: no running relay has this destination; add it to a relay's configuration and reload that relay (SIGHUP), or give it up: outbox-relay discard --destination default\n"
	if got := command(env, "events", "show", "2").stdout; !strings.Contains(got, why) {
		t.Errorf("events show says\n%s", got)
	}
	if r := command(env, "discard", "--destination=default", "--yes"); r.code != 0 || r.stdout != "Discarded 1 delivery.\n" {
		t.Errorf("%+v", r)
	}
	if got := status(); strings.Contains(got, "is unserved") { // an alert about it, if there was time for one, ends with the next look
		t.Errorf("status says\n%s", got)
	}

	// 5. SIGHUP changes nothing. After it no route is missing that was removed by hand: it has restored the route, or the relay has,
	// which looks at the stored routes by itself, too.
	relay.reloads(t, noChange)
	execute(t, db, "DELETE FROM outbox_route WHERE destination = 'logistics'")
	relay.reloads(t, `"msg":"configuration read again`)
	stored("after SIGHUP", routes)

	// 6. A restart works, and events are routed meanwhile.
	relay.stop(t)
	stored("while no relay runs", routes)
	enqueue("meanwhile")
	relay = launch(t, folder, database, "OUTBOX_NAME=billing")
	server.expect(t, "/logistics meanwhile", "/analytics meanwhile")
	relay.stop(t)
}

// Replicas get a new configuration one by one. Nothing is refused or needs a flag, events that both configurations send to
// a destination keep arriving there, and in the end the routes are the new ones.
func TestRollingDeploys(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for name, deploy := range map[string]struct {
		newFirst bool
		crash    int // of the old replicas, the one that is killed instead of stopped; -1: none
	}{
		"the new one first":               {true, -1},
		"the old one first":               {false, -1},
		"the new one first, and a crash":  {true, 0},
		"the old one last, with a crash":  {true, 1},
		"the old one first, with a crash": {false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.New(t, migrations.Outbox)
			db := open(t, dsn)
			server := newDestinationServer(t)
			folder := func(destinations, routes string) string {
				dir := t.TempDir()
				var list []string
				for destination := range strings.FieldsSeq(destinations) {
					list = append(list, fmt.Sprintf("%[1]s: {url: '%[2]s/%[1]s'}", destination, server.URL))
				}
				writeFile(t, filepath.Join(dir, usualFile), fmt.Sprintf("destinations: {%s}\nroutes: [%s]\n", strings.Join(list, ", "), routes))
				return dir
			}
			// One pattern stays, one moves, one is removed, one is added; a destination goes and one comes.
			before := folder("stays goes", "{event: keep, to: [stays]}, {event: move, to: [goes]}, {event: drop, to: [stays]}")
			after := folder("stays comes", "{event: keep, to: [stays]}, {event: move, to: [comes]}, {event: add, to: [comes]}")
			keys := 0
			enqueue := func(kind string) (key string) {
				keys++
				key = fmt.Sprint(keys)
				execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ($1, '{}', $2)", kind, key)
				return key
			}
			begin := func(dir string) *relayProcess { return launch(t, dir, "OUTBOX_DATABASE_URL="+dsn) }

			replicas := []*relayProcess{begin(before), begin(before)}
			server.expect(t, "/stays "+enqueue("keep"), "/goes "+enqueue("move"))
			// Something waits for the destination that goes: no replica is refused for it.
			execute(t, db, "INSERT INTO outbox (event_type, payload, idempotency_key, available_at) VALUES ('move', '{}', 'later', now() + interval '1 hour')")
			for i := range replicas {
				if i > 0 { // an old one is restarted in between
					replicas[i].stop(t)
					replicas[i] = begin(before)
					server.expect(t, "/stays "+enqueue("keep"), "/comes "+enqueue("add"))
				}
				old := replicas[i]
				if deploy.newFirst {
					replicas[i] = begin(after)
				}
				if i == deploy.crash {
					old.kill(t)
				} else {
					old.stop(t)
				}
				kept := enqueue("keep")
				if !deploy.newFirst {
					replicas[i] = begin(after)
				}
				server.expect(t, "/stays "+kept, "/comes "+enqueue("add"), "/comes "+enqueue("move"))
			}
			awaitUntil(t, "the new routes", func() bool {
				return query[string](t, db, allRoutes) == "add comes, keep stays, move comes"
			})
			server.expect(t, "/stays "+enqueue("keep"), "/comes "+enqueue("add"), "/comes "+enqueue("move"))
			enqueue("drop")
			if got := command([]string{"OUTBOX_DATABASE_URL=" + dsn}, "status").stdout; !strings.Contains(got, ` unserved: no running relay has "goes".`) {
				t.Errorf("status says\n%s", got)
			}
			if got := query[int](t, db, "SELECT count(*)::int FROM outbox_delivery WHERE destination = ''"); got != 1 {
				t.Errorf("%d events are parked", got)
			}
			var found destinations.RouteList
			if r := command([]string{"OUTBOX_DATABASE_URL=" + dsn}, "routes", "list", "--json"); json.Unmarshal([]byte(r.stdout), &found) != nil ||
				slices.ContainsFunc(found.Routes, func(r destinations.ListedRoute) bool { return len(r.Relays) != 2 }) {
				t.Errorf("%+v", r)
			}
			for _, r := range replicas {
				r.stop(t)
			}
		})
	}
}
