package elsewhere

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

var (
	nodeModules  = flag.String("elsewhere", "", "run the receivers; `directory` has the packages that node/package-lock.json names")
	relayProgram = flag.String("relay", "", "the `program` outbox-relay")
	require      = flag.Bool("require", false, "fail without a language's tools instead of skipping it")
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

// patience ends a test that would hang. No assertion depends on it.
const patience = time.Minute

// A language is one of the receivers. Its handler gets cases for three types of events, by which a
// test makes it misbehave.
type language struct {
	name, file, fence string   // file has its handler; fence: the language of its blocks in the document
	others            []string // files and folders of its package
	own               []string // what the interpreter runs for the package's own tests
	handler           string   // the line of file after which the cases go
	cases             string
	// prepare returns the command that runs the receiver in dir, which holds its file; an error
	// says what to install.
	prepare func(ctx context.Context, dir string) (command []string, err error)
	jdbc    bool // takes the database's URL as JDBC spells it
}

var languages = []language{
	{
		name: "node", file: "example.js", fence: "js", others: []string{"package.json", "index.js", "test"}, own: []string{"--test", "test/"}, handler: "async function handle(client, event, body) {",
		cases: `
  if (event.type === 'test.swallows') return client.query('SELECT 1 / 0').catch(() => {});
  if (event.type === 'test.commits') await client.query('COMMIT');
  if (event.type === 'test.search-path') await client.query("SELECT set_config('search_path', 'tenant, public', false); CREATE TEMP TABLE staging (n integer)");
  event.type = event.type.replace(/^test\..*/, 'invoice.created');`,
		prepare: prepareNode,
	},
	{
		name: "python", file: "example.py", fence: "python", others: []string{"outbox_relay_receiver", "tests"},
		own: []string{"-m", "unittest", "tests/test_receiver.py"}, handler: "def handle(conn, event, body):",
		cases: `
    import psycopg, re
    if event["type"] == "test.swallows":
        try:
            conn.execute("SELECT 1 / 0")
        except psycopg.Error:
            return
    if event["type"] == "test.commits":
        conn.commit()
    if event["type"] == "test.search-path":
        conn.execute("SELECT set_config('search_path', 'tenant, public', false); CREATE TEMP TABLE staging (n integer)")
    event["type"] = re.sub("^test[.].*", "invoice.created", event["type"])`,
		prepare: preparePython,
	},
	{
		name: "java", file: "Receiver.java", fence: "java", handler: "static void handle(Connection db, Event event, byte[] body) throws SQLException {",
		cases: `
        if (event.type().equals("test.swallows")) {
            try {
                execute(db, "SELECT 1 / 0");
            } catch (SQLException swallowed) {
                return;
            }
        }
        if (event.type().equals("test.commits")) db.commit();
        if (event.type().equals("test.search-path")) execute(db, "SELECT set_config('search_path', 'tenant, public', false); CREATE TEMP TABLE staging (n integer)");
        if (event.type().startsWith("test.")) event = new Event(event.idempotencyKey(), "invoice.created", 1, null, null, null, null, null);`,
		prepare: prepareJava, jdbc: true,
	},
}

func prepareNode(_ context.Context, dir string) ([]string, error) {
	node, err := exec.LookPath("node")
	if err != nil {
		return nil, errors.New("install Node.js 20 or newer: apt-get install nodejs")
	}
	modules, err := filepath.Abs(*nodeModules)
	if _, missing := os.Stat(filepath.Join(modules, "express")); missing != nil {
		return nil, fmt.Errorf("%s has no packages: install npm, by which make test-elsewhere gets them: apt-get install npm", modules)
	}
	if err == nil {
		err = os.Symlink(modules, filepath.Join(dir, "node_modules"))
	}
	return []string{node, "example.js"}, err
}

func preparePython(ctx context.Context, _ string) ([]string, error) {
	// Debian's packages are for Debian's Python, which need not be the first on PATH.
	for _, python := range []string{"python3", "/usr/bin/python3"} {
		if exec.CommandContext(ctx, python, "-c", "import psycopg, psycopg_pool").Run() == nil {
			return []string{python, "example.py"}, nil
		}
	}
	return nil, errors.New("install Python 3 with psycopg 3: apt-get install python3-psycopg python3-psycopg-pool")
}

// driver is where Debian's libpostgresql-jdbc-java puts it.
const driver = "/usr/share/java/postgresql.jar"

func prepareJava(ctx context.Context, dir string) ([]string, error) {
	if _, err := os.Stat(driver); err != nil {
		return nil, errors.New("install the driver for Java: apt-get install libpostgresql-jdbc-java")
	}
	compile := exec.CommandContext(ctx, "javac", "-J-XX:TieredStopAtLevel=1", "-cp", driver, "Receiver.java")
	compile.Dir = dir
	if text, err := compile.CombinedOutput(); errors.Is(err, exec.ErrNotFound) {
		return nil, errors.New("install a JDK, 17 or newer: apt-get install default-jdk-headless")
	} else if err != nil {
		return nil, errors.New(string(text))
	}
	return []string{"java", "-XX:TieredStopAtLevel=1", "-cp", ".:" + driver, "Receiver"}, nil
}

// receiver is a program that runs.
type receiver struct {
	language
	server  *localpg.Server
	dsn     string
	pool    *pgxpool.Pool // for assertions
	client  *http.Client
	command []string
	dir     string
	env     []string
	url     string
	process *exec.Cmd
	ended   *sync.WaitGroup
	log     strings.Builder // of the processes that have ended
}

// schema is what the document tells to create, and faults: an effect whose invoice begins with HOLD
// waits for the lock that a test holds, one with COMMIT-HOLD does so while it commits. FAIL and
// COMMIT-FAIL fail until the table fixed has a row.
const schema = `
CREATE TABLE shipments (invoice text NOT NULL, total numeric NOT NULL);
CREATE TABLE fixed (yes boolean);
CREATE FUNCTION fault() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF NEW.invoice LIKE tg_argv[0] || 'HOLD%' THEN
		PERFORM pg_advisory_xact_lock_shared(4711);
	ELSIF NEW.invoice LIKE tg_argv[0] || 'FAIL%' AND NOT EXISTS (SELECT FROM fixed) THEN
		RAISE EXCEPTION 'fault';
	END IF;
	RETURN NULL;
END $$;
CREATE TRIGGER fault AFTER INSERT ON shipments FOR EACH ROW EXECUTE FUNCTION fault('');
CREATE CONSTRAINT TRIGGER fault_at_commit AFTER INSERT ON shipments DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION fault('COMMIT-');
CREATE SCHEMA tenant;
CREATE TABLE tenant.processed_events (LIKE processed_events INCLUDING ALL);`

// copyTo copies a file of the package, or a folder with its files.
func (l language) copyTo(t *testing.T, dir, name string) {
	t.Helper()
	from := filepath.Join(l.name, name)
	text, err := os.ReadFile(from)
	if err == nil {
		pgtest.Must(t, os.WriteFile(filepath.Join(dir, name), text, 0o600))
		return
	}
	pgtest.Must(t, os.CopyFS(filepath.Join(dir, name), os.DirFS(from)))
}

func newReceiver(t *testing.T, server *localpg.Server, l language) *receiver {
	t.Helper()
	source, err := os.ReadFile(filepath.Join(l.name, l.file))
	pgtest.Must(t, err)
	if strings.Count(string(source), l.handler) != 1 {
		t.Fatalf("%s has no line %q", l.file, l.handler)
	}
	r := &receiver{language: l, server: server, dir: t.TempDir(), client: &http.Client{Timeout: patience, Transport: &http.Transport{MaxIdleConnsPerHost: 20}}}
	t.Cleanup(r.client.CloseIdleConnections)
	text := strings.Replace(string(source), l.handler, l.handler+l.cases, 1)
	pgtest.Must(t, os.WriteFile(filepath.Join(r.dir, l.file), []byte(text), 0o600))
	for _, name := range l.others {
		l.copyTo(t, r.dir, name)
	}
	if r.command, err = l.prepare(t.Context(), r.dir); err != nil && *require {
		t.Fatal(err)
	} else if err != nil {
		t.Skip(err)
	}
	if l.own != nil {
		tests := exec.CommandContext(t.Context(), r.command[0], l.own...)
		tests.Dir = r.dir
		if text, err := tests.CombinedOutput(); err != nil {
			t.Fatalf("the package's own tests: %v\n%s", err, text)
		}
	}
	r.database(t)
	url := "postgres://postgres@" + server.TCPAddr() + "/" + l.name
	if l.jdbc {
		url = "jdbc:postgresql://" + server.TCPAddr() + "/" + l.name + "?user=postgres"
	}
	r.env = append(os.Environ(), "DATABASE_URL="+url, "FINANCE_SECRET="+oldSecret+", "+secret, "PORT=0", "BODY_SECONDS=2", "EFFECTS="+effects, "PYTHONDONTWRITEBYTECODE=1")
	r.start(t)
	t.Cleanup(func() {
		r.kill()
		if t.Failed() {
			t.Logf("the receiver printed:\n%s", r.log.String())
		}
	})
	return r
}

// database makes the receiver's database.
func (r *receiver) database(t *testing.T) {
	t.Helper()
	pgtest.Must(t, r.server.CreateDatabase(t.Context(), r.name, ""))
	r.dsn = r.server.DSN(r.name)
	pgtest.Migrate(t, r.dsn, migrations.Inbox)
	r.pool = pgtest.Pool(t, r.dsn)
	r.exec(t, schema+effectsSchema)
}

var listening = regexp.MustCompile(`^listening on port ([0-9]+)$`)

// start runs the receiver, and returns when it listens.
func (r *receiver) start(t *testing.T) {
	t.Helper()
	process := exec.Command(r.command[0], r.command[1:]...)
	process.Dir, process.Env = r.dir, r.env
	out, in, err := os.Pipe()
	pgtest.Must(t, err)
	process.Stdout, process.Stderr = in, in
	pgtest.Must(t, process.Start())
	in.Close()
	port := make(chan string, 1)
	r.process, r.ended = process, &sync.WaitGroup{}
	r.ended.Go(func() {
		defer out.Close()
		defer close(port)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if found := listening.FindStringSubmatch(lines.Text()); found != nil {
				port <- found[1]
			}
			r.log.WriteString(lines.Text() + "\n")
		}
	})
	found, ok := <-port
	if !ok {
		r.kill()
		t.Fatalf("the receiver ended at once:\n%s", r.log.String())
	}
	r.url = "http://127.0.0.1:" + found + "/webhooks/finance"
}

// kill ends the process as kill -9 does.
func (r *receiver) kill() {
	_ = r.process.Process.Kill()
	_ = r.process.Wait()
	r.ended.Wait()
}

func (r *receiver) exec(t *testing.T, query string, args ...any) {
	t.Helper()
	if _, err := r.pool.Exec(t.Context(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// hold makes effects whose invoice begins with HOLD wait, until release is called.
func (r *receiver) hold(t *testing.T) (release func()) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), r.dsn)
	if err == nil {
		_, err = conn.Exec(t.Context(), "SELECT pg_advisory_lock(4711)")
	}
	pgtest.Must(t, err)
	release = sync.OnceFunc(func() { _ = conn.Close(context.Background()) })
	t.Cleanup(release)
	return release
}

// held waits until an effect waits for the lock of hold, and returns its session.
func (r *receiver) held(t *testing.T) (pid int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for pid == 0 {
		err := r.pool.QueryRow(ctx, `SELECT coalesce(max(pid), 0) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock' AND wait_event = 'advisory'`).Scan(&pid)
		if err != nil {
			t.Fatalf("no effect waits: %v", err)
		}
	}
	return pid
}

// gone waits for the end of a session.
func (r *receiver) gone(t *testing.T, pid int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for there := true; there; {
		if err := r.pool.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", pid).Scan(&there); err != nil {
			t.Fatalf("session %d does not end: %v", pid, err)
		}
	}
}

// wantRows asserts how often an invoice took effect, and whether the event with this key is
// remembered.
func (r *receiver) wantRows(t *testing.T, key, invoice string, effects, remembered int) {
	t.Helper()
	var shipments, rows int
	err := r.pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM shipments WHERE invoice = $1),
		(SELECT count(*) FROM processed_events WHERE receiver = 'shipping' AND source = 'finance' AND idempotency_key = $2)`, invoice, key).
		Scan(&shipments, &rows)
	if err != nil || shipments != effects || rows != remembered {
		t.Errorf("%d effects and %d rows of %s (%v), want %d and %d", shipments, rows, key, err, effects, remembered)
	}
}
