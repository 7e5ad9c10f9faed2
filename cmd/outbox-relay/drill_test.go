package main

import (
	"context"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/drill"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// A drilled receiver has an effect for each invoice, and a URL that counts them.
type drilled struct {
	dsn, url, probe string
	pool            *pgxpool.Pool
}

// startDrilled serves a receiver. wrap may change it.
func startDrilled(t *testing.T, wrap func(http.Handler) http.Handler) drilled {
	t.Helper()
	r := drilled{dsn: pgtest.New(t, migrations.Inbox)}
	r.pool = pgtest.Pool(t, r.dsn)
	pgtest.Exec(t, r.pool, "CREATE TABLE shipment (invoice text)")
	router := consumer.NewRouter()
	type invoice struct {
		Number string `json:"invoice"`
	}
	consumer.HandleJSON(router, "invoice.created", 1, func(ctx context.Context, tx pgx.Tx, _ consumer.Event, i invoice) error {
		_, err := tx.Exec(ctx, "INSERT INTO shipment VALUES ($1)", i.Number)
		return err
	})
	receive, err := consumer.New(r.pool, consumer.Config{
		Receiver: "logistics", Secrets: []string{goodSecret}, Limits: consumer.Limits{BodyTimeout: 2 * time.Second}, Logger: slog.New(slog.DiscardHandler),
	}, router.Dispatch)
	pgtest.Must(t, err)
	mux := http.NewServeMux()
	mux.Handle("POST /hook", wrap(receive))
	mux.HandleFunc("GET /count", func(w http.ResponseWriter, request *http.Request) {
		var n int
		if err := r.pool.QueryRow(request.Context(), "SELECT count(*) FROM shipment WHERE invoice = $1", request.URL.Query().Get("key")).Scan(&n); err != nil {
			w.WriteHeader(http.StatusInternalServerError)
		}
		fmt.Fprintln(w, n)
	})
	server := httptest.NewUnstartedServer(mux)
	server.Config.ReadHeaderTimeout = 2 * time.Second
	server.Start()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	r.url, r.probe = server.URL+"/hook", server.URL+"/count?key={key}"
	return r
}

func unchanged(h http.Handler) http.Handler { return h }

// doubled sends every request to the receiver a second time, under another name for it: its effect
// comes twice.
func (r *drilled) doubled(t *testing.T) {
	t.Helper()
	pgtest.Exec(t, r.pool, `CREATE FUNCTION again() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF pg_trigger_depth() = 1 THEN INSERT INTO shipment VALUES (NEW.invoice); END IF; RETURN NULL; END $$;
		CREATE TRIGGER again AFTER INSERT ON shipment FOR EACH ROW EXECUTE FUNCTION again()`)
}

var drillFlags = []string{"--type=invoice.created", `--payload={"invoice":"{key}","total":"1.00"}`, "--rate=100", "--for=500ms", "--settle=1m"}

const countShipments = "--probe-sql=SELECT count(*) FROM shipment WHERE invoice = $1"

func drillCommand(env []string, args ...string) result {
	return command(append(env, "OUTBOX_SIGNING_SECRET="+goodSecret), append(append([]string{"drill"}, drillFlags...), args...)...)
}

func TestDrillPassesOurs(t *testing.T) {
	t.Parallel()
	r := startDrilled(t, unchanged)
	junit := filepath.Join(t.TempDir(), "drill.xml")
	for name, got := range map[string]result{
		"by SQL":   drillCommand(nil, r.url, countShipments, "--probe-database="+r.dsn, "--json", "--junit="+junit, "--skip=key-blanks,key-utf8"),
		"by a URL": drillCommand(nil, r.url, "--probe-url="+r.probe, "--json", "--strict"),
	} {
		var report drill.Report
		if err := json.Unmarshal([]byte(got.stdout), &report); err != nil || got.code != 0 {
			t.Fatalf("%s: %v %+v", name, err, got)
		}
		skipped := 2 + map[string]int{"by SQL": 2}[name] // the secrets that are not there
		if len(report.Checks) != len(drill.Checks()) || report.Count(drill.Passed) != len(report.Checks)-skipped || report.Count(drill.Skipped) != skipped || !report.Probed {
			t.Errorf("%s: %+v", name, report)
		}
		if !strings.Contains(got.stderr, "passed   duplicate\n") || strings.Contains(got.stdout+got.stderr, "whsec_") {
			t.Errorf("%s: stderr %s", name, got.stderr)
		}
	}
	text, err := os.ReadFile(junit)
	pgtest.Must(t, err)
	var suite struct {
		Tests    int `xml:"tests,attr"`
		Failures int `xml:"failures,attr"`
		Skipped  int `xml:"skipped,attr"`
		Cases    []struct {
			Name string `xml:"name,attr"`
		} `xml:"testcase"`
	}
	if err := xml.Unmarshal(text, &suite); err != nil || suite.Tests != len(drill.Checks()) || suite.Failures != 0 || suite.Skipped != 4 || len(suite.Cases) != suite.Tests {
		t.Errorf("%v\n%s", err, text)
	}
}

func TestDrillFindsMistakes(t *testing.T) {
	t.Parallel()
	r := startDrilled(t, unchanged)
	r.doubled(t)
	junit := filepath.Join(t.TempDir(), "drill.xml")
	got := drillCommand(nil, r.url, countShipments, "--probe-database="+r.dsn, "--only=valid", "--junit="+junit)
	got.holds(t, cli.ExitFound, "", "1 check failed; the receiver is not ready for a relay")
	for _, part := range []string{"FAILED: valid\n", "found:    it had 2 effects instead of 1\n", "docs/receiving.md#the-handler\n", "0 passed, 1 failed, 0 warned, "} {
		if !strings.Contains(got.stdout, part) {
			t.Errorf("%q is not in %s", part, got.stdout)
		}
	}
	if text, err := os.ReadFile(junit); err != nil || !strings.Contains(string(text), `<failure message="it had 2 effects instead of 1">`) {
		t.Errorf("%v %s", err, text)
	}

	// Without a probe the answers are right. Checks that nobody asked for are counted, and not
	// listed.
	notAsked := fmt.Sprintf("2 passed, 0 failed, 0 warned, 1 skipped, %d not asked for; ", len(drill.Checks())-3)
	if got := drillCommand(nil, r.url, "--only=duplicate,same-content"); got.code != 0 || !strings.Contains(got.stdout, "Effects were not counted") ||
		got.stderr != "passed   valid\npassed   duplicate\nskipped  same-content\n" || !strings.Contains(got.stdout, notAsked) {
		t.Errorf("%+v", got)
	}
	// A warning is none of the failures, unless it is to be.
	lenient := startDrilled(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
			answer := httptest.NewRecorder()
			if h.ServeHTTP(answer, request); answer.Code == http.StatusUnauthorized {
				answer.Code = http.StatusBadRequest
			}
			w.WriteHeader(answer.Code)
		})
	})
	for _, strict := range []string{"--strict=false", "--strict"} {
		got := drillCommand(nil, lenient.url, "--only=refusal-status", "--probe-url="+lenient.probe, strict)
		if want := map[string]int{"--strict": cli.ExitFound}[strict]; got.code != want || !strings.Contains(got.stdout, "WARNED: refusal-status\n") {
			t.Errorf("%s: %+v", strict, got)
		}
	}
}

// A probe cannot write, and one that counts anything else is refused.
func TestDrillDistrustsItsProbe(t *testing.T) {
	t.Parallel()
	r := startDrilled(t, unchanged)
	pgtest.Exec(t, r.pool, "INSERT INTO shipment VALUES ('old')")
	database := "PROBE_DATABASE_URL=" + r.dsn
	for probe, want := range map[string]string{
		"--probe-sql=SELECT count(*) FROM shipment WHERE $1 <> ''":           "counts 1 effects of a key that was never sent",
		"--probe-sql=DELETE FROM shipment WHERE invoice <> $1 RETURNING 0":   "read-only transaction",
		"--probe-sql=SELECT count(*) FROM shipments WHERE invoice = $1":      `relation "shipments" does not exist`,
		"--probe-url=" + strings.Replace(r.probe, "/count", "/none", 1):      "it answered 404 Not Found",
		"--probe-url=" + strings.Replace(r.probe, "http://", "http:// x", 1): "it is no URL",
	} {
		if got := drillCommand([]string{database}, r.url, probe); got.code == 0 || !strings.Contains(got.stderr, want) || strings.Contains(got.stderr, "migrat") {
			t.Errorf("%s: %+v, want %q", probe, got, want)
		}
	}
	drillCommand([]string{"PROBE_DATABASE_URL=postgres://nobody@127.0.0.1:1/none"}, r.url, countShipments).holds(t, cli.ExitDatabase, "", "")
	var n int
	if err := r.pool.QueryRow(t.Context(), "SELECT count(*) FROM shipment").Scan(&n); err != nil || n != 1 {
		t.Errorf("%d rows (%v)", n, err)
	}
}

func TestDrillIsRefused(t *testing.T) {
	t.Parallel()
	file := writeFile(t, filepath.Join(t.TempDir(), usualFile), "destinations:\n  a: {url: 'https://a.example.com', signing_secrets: ['"+goodSecret+"']}\n  b: {url: 'https://b.example.com'}\n")
	secrets := writeFile(t, filepath.Join(t.TempDir(), "secrets"), "whsec_short\n")
	const url = "http://127.0.0.1:1/hook"
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"ftp://receiver.test"}, "URL: write one such as"},
		{[]string{url}, "name the secrets that the receiver accepts"},
		{[]string{url, "--rate=0"}, "--rate: 0 is out of range"},
		{[]string{url, "--for=2m"}, "--for: 2m0s is out of range"},
		{[]string{url, "--settle=-1s"}, "--settle: -1s is not more than zero"},
		{[]string{url, "--probe-sql=SELECT 1"}, "--probe-sql needs the receiver's database"},
		{[]string{url, "--probe-sql=SELECT 1", "--probe-url=http://x"}, "can't be used together"},
		{[]string{url, "--secret-file=" + secrets}, "--secret-file: secret 1: "},
		{[]string{url, "--config=" + file}, "name the secrets that the receiver accepts, by OUTBOX_SIGNING_SECRET or --secret-file, or the destination as which it is tried, by --destination: a, b"},
		{[]string{url, "--config=" + file, "--destination=c"}, `there is no destination "c"; there is a, b`},
		{[]string{url, "--config=" + file, "--destination=b"}, "name the secrets that the receiver accepts"},
		{[]string{url, "--config=" + file, "--destination=a", "--only=duplicates"}, `there is no check "duplicates"`},
	} {
		got := command(nil, append([]string{"drill"}, test.args...)...)
		if got.code != cli.ExitUsage || !strings.Contains(got.stderr, test.want) || strings.Contains(got.stderr, "whsec_short") {
			t.Errorf("%q: %+v, want %q", test.args, got, test.want)
		}
	}
	// The environment's secret and a file of secrets are enough, however many destinations are
	// configured.
	good, both := writeFile(t, filepath.Join(t.TempDir(), "good"), goodSecret), "destinations:\n  default: {url: 'https://a.example.com'}\n  b: {url: 'https://b.example.com'}\n"
	one := "destinations:\n  b: {url: 'https://b.example.com'}\n"
	for _, test := range []struct {
		env  []string
		args []string
	}{
		{[]string{"OUTBOX_SIGNING_SECRET=" + goodSecret}, []string{"--config=" + file}},
		{[]string{"OUTBOX_SIGNING_SECRET_FILE=" + good}, []string{"--config=" + file}},
		{[]string{"OUTBOX_SIGNING_SECRET=" + goodSecret}, []string{"--config=" + writeFile(t, filepath.Join(t.TempDir(), usualFile), both)}},
		{[]string{"OUTBOX_SIGNING_SECRET=" + goodSecret}, []string{"--config=" + writeFile(t, filepath.Join(t.TempDir(), usualFile), one)}},
		{nil, []string{"--config=" + file, "--secret-file=" + good}},
		{nil, []string{"--config=" + file, "--secret-file=" + good, "--destination=b"}},
	} {
		if got := command(test.env, append([]string{"drill", url}, test.args...)...); got.code != cli.ExitFound || !strings.Contains(got.stdout, "0 passed, 1 failed, 0 warned") {
			t.Errorf("%q %q: %+v", test.env, test.args, got)
		}
	}
	// A receiver that cannot be reached fails the first check, and no other one is made.
	got := command(nil, "drill", url, "--config="+file, "--destination=a")
	if got.code != cli.ExitFound || !strings.Contains(got.stdout, "connection refused") || !strings.Contains(got.stdout, "0 passed, 1 failed, 0 warned") {
		t.Errorf("%+v", got)
	}
}
