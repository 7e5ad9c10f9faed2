package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// tenants are three databases and two schemas of a fourth.
type tenants struct {
	names   []string
	dsn     map[string]string
	schema  map[string]string
	entries string // of databases, in the file
}

func newTenants(t *testing.T) (s tenants) {
	t.Helper()
	s = tenants{dsn: map[string]string{}, schema: map[string]string{}}
	shared := pgtest.New(t)
	for _, name := range []string{"one", "two", "three", "east", "west"} {
		if s.dsn[name] = shared; len(s.names) < 3 {
			s.dsn[name] = pgtest.New(t, migrations.Outbox)
		} else {
			s.schema[name] = name
			if r := command([]string{"OUTBOX_DATABASE_URL=" + shared}, "migrate", "up", "--schema="+name); r.code != 0 {
				t.Fatalf("%+v", r)
			}
		}
		s.names = append(s.names, name)
		s.entries += fmt.Sprintf("- {name: %s, url: '%s', schema: '%s'}\n", name, s.dsn[name], s.schema[name])
	}
	return s
}

func (s tenants) insert(t *testing.T, name string, n int, prefix string) (keys []string) {
	t.Helper()
	into := "outbox"
	if s.schema[name] != "" {
		into = s.schema[name] + ".outbox"
	}
	execute(t, open(t, s.dsn[name]), "INSERT INTO "+into+" (event_type, payload, idempotency_key) SELECT 't', '{}', $1 || i FROM generate_series(1, $2::int) i", prefix+name+"-", n)
	for i := range n {
		keys = append(keys, fmt.Sprintf("%s%s-%d", prefix, name, i+1))
	}
	return keys
}

// get returns what the relay's monitor answers.
func get(t *testing.T, address, path string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+path, http.NoBody)
	pgtest.Must(t, err)
	resp, err := (&http.Client{Timeout: 10 * time.Second}).Do(req)
	pgtest.Must(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	pgtest.Must(t, err)
	return string(text)
}

// One process serves five outboxes. A sixth whose database is away and a seventh without a schema
// delay none, and are served later.
func TestSeveralOutboxes(t *testing.T) {
	t.Parallel()
	s := newTenants(t)
	closed, err := net.Listen("tcp", "127.0.0.1:0") // kept, and never accepting: no other test gets the port
	pgtest.Must(t, err)
	defer closed.Close()
	later := pgtest.New(t)
	receiver := relaytest.NewReceiver(t, nil)
	file := filepath.Join(t.TempDir(), usualFile)
	config := func(path string) string {
		return fmt.Sprintf("destinations: {shop: {url: '%s/%s'}}\nrelay: {poll_interval: 1s}\nlog: {format: json}\ndatabases:\n- {name: silent, url: 'postgres://u@%s/x'}\n- {name: down, url: 'postgres://u@127.0.0.1:1/x'}\n- {name: later, url: '%s'}\n%s",
			receiver.URL, path, closed.Addr(), later, s.entries)
	}
	replaceFile(t, file, config("old"))
	run := start(t, []string{"OUTBOX_METRICS_LISTEN=127.0.0.1:0"}, "--config="+file)
	var keys []string
	for _, name := range s.names {
		keys = append(keys, s.insert(t, name, 20, "a-")...)
	}
	arrived := func(keys []string) {
		t.Helper()
		relaytest.Eventually(t, "all events", func() bool {
			got := receiver.Keys()
			return !slices.ContainsFunc(keys, func(key string) bool { return !slices.Contains(got, key) })
		})
	}
	arrived(keys)
	run.stderr.wait(t, `"this outbox is not served; the others are; it will be tried again"`, run.code)
	address := regexp.MustCompile(`"metrics":"([^"]+)"`).FindStringSubmatch(run.stderr.String())[1]
	var ready struct{ Reasons []string }
	pgtest.Must(t, json.Unmarshal([]byte(get(t, address, "/readyz")), &ready))
	var named []string
	for _, reason := range ready.Reasons {
		named = append(named, strings.Fields(reason)[1])
	}
	slices.Sort(named)
	testkit.Equal(t, "not ready", strings.Join(slices.Compact(named), " "), "down: later: silent:")
	shown := get(t, address, "/metrics")
	for _, want := range []string{
		`outbox_claimed_deliveries_total{database="one",destination="shop"} 20`, `outbox_claimed_deliveries_total{database="west",destination="shop"} 20`,
		`outbox_relay_registered{database="down"} 0`, "outbox_build_info{version=", "\ngo_goroutines ",
	} {
		if !strings.Contains(shown, want) {
			t.Errorf("the metrics lack %s", want)
		}
	}
	testkit.Contains(t, "the log does not name the database", run.stderr.String(), `"database":"east"`)

	replaceFile(t, file, config("new"))
	run.reload(t, inEffect)
	for _, name := range s.names {
		run.stderr.wait(t, `"database":"`+name+`","changes":["destinations.shop changed: url"]`, run.code)
		arrived(s.insert(t, name, 1, "b-"))
	}
	for _, r := range receiver.All() {
		if want := map[string]string{"a": "/old", "b": "/new"}[r.Key[:1]]; r.URL.Path != want {
			t.Errorf("%s went to %s", r.Key, r.URL.Path)
		}
	}
	pgtest.Migrate(t, later, migrations.Outbox)
	execute(t, open(t, later), "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'b-later')")
	arrived([]string{"b-later"})

	// One entry is left, and one is added: of the same database, under another name.
	replaceFile(t, file, strings.Replace(config("new"), "- {name: later, ", "- {name: renamed, ", 1))
	run.reload(t, "this outbox is served from now on")
	execute(t, open(t, later), "INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'b-renamed')")
	arrived([]string{"b-renamed"})
	relaytest.Eventually(t, "metrics of the entries that there are", func() bool {
		shown := get(t, address, "/metrics")
		return strings.Contains(shown, `outbox_claimed_deliveries_total{database="renamed",destination="shop"}`) && !strings.Contains(shown, `database="later"`)
	})
	began := time.Now()
	run.end(t, 0)
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("the stop took %s", took)
	}
}

// One outbox refuses a reload. All others have the new configuration, and so has the process. The
// log names that outbox alone.
func TestOneOutboxRefusesAReload(t *testing.T) {
	t.Parallel()
	well, refusing := pgtest.New(t, migrations.Outbox), pgtest.New(t, migrations.Outbox)
	file := filepath.Join(t.TempDir(), usualFile)
	config := func(path, more string) string {
		return fmt.Sprintf("destinations: {shop: {url: 'http://127.0.0.1:1/%s'}%s\ndatabases:\n- {name: well, url: '%s'}\n- {name: refusing, url: '%s'}\n", path, more, well, refusing)
	}
	replaceFile(t, file, config("old", "}\nlog: {format: json}"))
	run := start(t, []string{"OUTBOX_METRICS_LISTEN=none", "OUTBOX_ADMIN_LISTEN=127.0.0.1:0"}, "--config="+file)
	relaytest.Eventually(t, "both relays", func() bool { return strings.Count(run.stderr.String(), `"msg":"registered"`) == 2 })
	address := regexp.MustCompile(`"page":"([^"]+)"`).FindStringSubmatch(run.stderr.String())[1]
	execute(t, open(t, refusing), `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused here'; END $$`)
	execute(t, open(t, refusing), `CREATE TRIGGER refuse BEFORE INSERT ON outbox_route FOR EACH ROW EXECUTE FUNCTION refuse()`)

	before := len(run.stderr.String())
	replaceFile(t, file, config("new", ", mail: {url: 'http://127.0.0.1:1/'}}\nlog: {format: console, level: debug}"))
	run.reload(t, "refused here")
	for name, path := range map[string]string{"well": "new", "refusing": "old"} {
		relaytest.Eventually(t, "the URL on the page of "+name, func() bool { // which ends a question that takes too long
			return strings.Contains(get(t, address, "/databases/"+name+"/destinations/shop"), "http://127.0.0.1:1/"+path)
		})
	}
	run.end(t, 0)
	log := run.stderr.String()[before:]
	testkit.Contains(t, "the log", log, `"databases":["refusing"],`, "database refusing: ", "refused here",
		`"msg":"some databases refused the new configuration and keep what they had; it is in effect for all others"`,
		`"database":"well","changes":[`, `"msg":"log.level changed"`, `"settings":["log.format"]`)
	if strings.Contains(log, notUsable) {
		t.Errorf("the log says that nothing has changed:\n%s", log)
	}
}

// The page and the API of each outbox lie below its name, and the first page lists them. A reload
// adds and removes them.
func TestPagesOfSeveralOutboxes(t *testing.T) {
	t.Parallel()
	s := newTenants(t)
	receiver := relaytest.NewReceiver(t, nil)
	file := filepath.Join(t.TempDir(), usualFile)
	config := fmt.Sprintf("destinations: {shop: {url: '%s'}}\nlog: {format: json}\nadmin: {path_prefix: /ops}\ndatabases:\n%s", receiver.URL, s.entries)
	replaceFile(t, file, config)
	run := start(t, []string{"OUTBOX_METRICS_LISTEN=none", "OUTBOX_ADMIN_LISTEN=127.0.0.1:0"}, "--config="+file)
	run.stderr.wait(t, `"page":"`, run.code)
	address := regexp.MustCompile(`"page":"([^"]+)"`).FindStringSubmatch(run.stderr.String())[1]
	key := s.insert(t, "two", 1, "page-")[0]
	relaytest.Eventually(t, "the event on the page of its outbox", func() bool {
		return strings.Contains(get(t, address, "/ops/databases/two/api/v1/events"), key)
	})
	if events := get(t, address, "/ops/databases/one/api/v1/events"); strings.Contains(events, key) {
		t.Errorf("another outbox has it: %s", events)
	}
	var page string
	relaytest.Eventually(t, "the page of events", func() bool { // which ends a question that takes too long
		page = get(t, address, "/ops/databases/two/events")
		return strings.Contains(page, `href="/ops/databases/two/events/1"`)
	})
	testkit.Contains(t, "the page of events", page, `id="home" href="/ops/"`, "<strong>two</strong>")
	listed := func() (names []string) {
		for _, found := range regexp.MustCompile(`id="to-([^"]+)" href="/ops/databases/`).FindAllStringSubmatch(get(t, address, "/ops/"), -1) {
			names = append(names, found[1])
		}
		return names
	}
	all := slices.Sorted(slices.Values(s.names))
	if got := listed(); !slices.Equal(got, all) {
		t.Errorf("the first page lists %q, want %q", got, all)
	}
	for _, path := range []string{"/ops/databases/none/", "/ops/databases/none/api/v1/events", "/ops/events", "/databases/two/"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+path, http.NoBody)
		pgtest.Must(t, err)
		resp, err := (&http.Client{Timeout: 10 * time.Second}).Do(req)
		pgtest.Must(t, err)
		_ = resp.Body.Close()
		if of := resp.Header.Get("Content-Type"); resp.StatusCode != http.StatusNotFound || strings.Contains(path, "/api/") != strings.Contains(of, "json") {
			t.Errorf("%s is answered with %d, %s", path, resp.StatusCode, of)
		}
	}
	replaceFile(t, file, strings.Replace(config, "- {name: two, ", "- {name: renamed, ", 1))
	run.reload(t, "this outbox is served from now on")
	relaytest.Eventually(t, "the page of the new name", func() bool { return slices.Contains(listed(), "renamed") && !slices.Contains(listed(), "two") })
	testkit.Contains(t, "the renamed outbox", get(t, address, "/ops/databases/renamed/api/v1/events"), key)
	run.end(t, 0)
}

// A process that is killed loses no event of any outbox.
func TestSeveralOutboxesAfterAKill(t *testing.T) {
	t.Parallel()
	s := newTenants(t)
	started := make(chan struct{}, 1000)
	receiver := relaytest.NewReceiver(t, func(w http.ResponseWriter, _ relaytest.Request) {
		started <- struct{}{}
		w.WriteHeader(http.StatusNoContent)
	})
	file := writeFile(t, filepath.Join(t.TempDir(), usualFile),
		fmt.Sprintf("destinations: {shop: {url: '%s', max_in_flight: 4}}\ndatabases:\n%s", receiver.URL, s.entries))
	var keys []string
	for _, name := range s.names {
		keys = append(keys, s.insert(t, name, 60, "")...)
	}
	relay := launch(t, t.TempDir(), []string{"run", "--config", file}, "OUTBOX_METRICS_LISTEN=none", "OUTBOX_ADMIN_LISTEN=none")
	for range 40 {
		<-started
	}
	receiver.Kill(t, relay.program)
	<-relay.code
	run := start(t, nil, "--config="+file)
	relaytest.Eventually(t, "all events", func() bool {
		got := receiver.Keys()
		return !slices.ContainsFunc(keys, func(key string) bool { return !slices.Contains(got, key) })
	})
	run.end(t, 0)
}

// status shows all outboxes, those with trouble first. Other commands ask which one is meant.
func TestStatusOfSeveralOutboxes(t *testing.T) {
	t.Parallel()
	s := newTenants(t)
	file := writeFile(t, filepath.Join(t.TempDir(), usualFile), "destinations: {shop: {url: 'http://127.0.0.1:1/'}}\ndatabases:\n"+s.entries+
		"- {name: empty, url: '"+pgtest.New(t)+"'}\n")
	run := start(t, nil, "--config="+file)
	defer run.end(t, 0)
	for _, name := range s.names {
		relaytest.Eventually(t, "a relay in "+name, func() bool {
			return strings.Contains(command(nil, "status", "--database="+name, "--config="+file).stdout, "All is well.")
		})
	}
	if r := command(nil, "pause", "shop", "--reason=test", "--database=west", "--config="+file); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	if r := command(nil, "status", "--healthcheck", "--config="+file); r.code != 0 || !strings.HasSuffix(r.stdout, " lives in 5 of 6 databases\n") {
		t.Errorf("%+v", r)
	}
	r := command(nil, "status", "--config="+file)
	lines := strings.Split(r.stdout, "\n")
	if r.code != 5 || !strings.HasPrefix(lines[0], "database empty: schema mismatch") || lines[1] != "database west:" ||
		!strings.Contains(r.stdout, "\ndatabase one: all is well, 1 relay, 0 pending\n") || !strings.Contains(r.stderr, "1 database was not read") {
		t.Errorf("%d\n%s\n%s", r.code, r.stdout, r.stderr)
	}
	var all struct {
		Databases []struct {
			Database, Error string
			Status          *struct{ Relays []struct{} }
		}
	}
	pgtest.Must(t, json.Unmarshal([]byte(command(nil, "status", "--json", "--config="+file).stdout), &all))
	if len(all.Databases) != 6 || all.Databases[0].Error == "" || all.Databases[1].Database != "west" || len(all.Databases[1].Status.Relays) != 1 {
		t.Errorf("%+v", all)
	}
	command(nil, "status", "--database=east", "--config="+file).holds(t, 0, "All is well.", "")
	for _, args := range [][]string{{"events", "list"}, {"migrate", "status"}, {"relays"}} {
		r := command(nil, append(args, "--config="+file)...)
		if r.code != 3 || !strings.Contains(r.stderr, "choose one with --database NAME: one, two, three, east, west, empty") {
			t.Errorf("%s: %+v", args, r)
		}
		if r := command(nil, append(args, "--database=west", "--config="+file)...); r.code != 0 {
			t.Errorf("%s: %+v", args, r)
		}
	}
}
