package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/receivertest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// compared is a sender and a receiver that the command compares.
type compared struct {
	sender   *relaytest.Database
	receiver *relaytest.Database
	env      []string
	url      string // of consumer.Reconcile
}

func newCompared(t testing.TB) compared {
	t.Helper()
	return newComparedAt(t, pgtest.New(t, migrations.Outbox), pgtest.New(t, migrations.Inbox), unchanged)
}

// newComparedAt is newCompared in databases of the test's own. wrap wraps the receiver.
func newComparedAt(t testing.TB, sender, receiver string, wrap func(http.Handler) http.Handler) compared {
	t.Helper()
	c := compared{sender: relaytest.At(t, sender), receiver: relaytest.At(t, receiver)}
	c.receiver.Exec(`CREATE TABLE effect (key text)`)
	cfg := consumer.Config{Receiver: "shop", Source: "billing", Secrets: []string{receivertest.SecretText}, Logger: slog.New(slog.DiscardHandler)}
	receive, err := consumer.New(c.receiver.Pool, cfg, func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
		_, err := tx.Exec(ctx, "INSERT INTO effect VALUES ($1)", event.IdempotencyKey)
		return err
	})
	pgtest.Must(t, err)
	compare, err := consumer.Reconcile(c.receiver.Pool, consumer.ReconcileConfig{Config: cfg, Effects: "SELECT key FROM effect"})
	pgtest.Must(t, err)
	mux := http.NewServeMux()
	mux.Handle("POST /events", wrap(receive))
	mux.Handle("POST /events/reconcile", compare)
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	c.url = server.URL + "/events/reconcile"
	c.env = []string{
		"OUTBOX_DATABASE_URL=" + c.sender.DSN, "OUTBOX_DESTINATION_URL=" + server.URL + "/events", "OUTBOX_SIGNING_SECRET=" + receivertest.SecretText,
		"RECEIVER_DATABASE_URL=" + c.receiver.DSN,
	}
	return c
}

// Through a relay and a receiver, over HTTP and over both databases: nothing is found, then what
// was planted, then what never arrived is replayed, and takes effect.
func TestReconcile(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	relay := start(t, c.env)
	defer relay.end(t, 0)
	c.sender.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'paid', '{}', 'k' || i FROM generate_series(1, 40) i`)
	delivered := func(n int) {
		t.Helper()
		relaytest.Becomes(c.sender, n, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered'`)
	}
	delivered(40)
	overHTTP, overDatabase := []string{"--url=" + c.url}, []string{"--receiver=shop", "--source=billing", "--effects=SELECT key FROM effect"}
	ask := func(how []string, more ...string) result {
		return command(c.env, append(append([]string{"reconcile", "--destination=default", "--settle=1ms"}, how...), more...)...)
	}
	for _, how := range [][]string{overHTTP, overDatabase} {
		if r := ask(how); r.code != 0 || !strings.HasPrefix(r.stdout, "40 deliveries to default compared with 40 events of receiver shop from source billing\n") ||
			!strings.HasSuffix(r.stdout, "\nAll of it took effect, once.\n") || r.stderr != "" {
			t.Errorf("%+v", r)
		}
	}

	c.receiver.Exec(`DELETE FROM processed_events WHERE idempotency_key IN ('k7', 'k8')`)
	c.receiver.Exec(`DELETE FROM effect WHERE key IN ('k7', 'k8')`)
	c.receiver.Exec(`INSERT INTO effect VALUES ('k9')`)
	c.receiver.Exec(`DELETE FROM effect WHERE key = 'k10'`)
	c.receiver.Exec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('shop', 'billing', E'\x1b[31mred', 'succeeded')`)
	const summary = "outbox-relay: 2 never arrived; 1 effect without event; 1 effect twice; 1 processed, no effect\n"
	for _, how := range [][]string{overHTTP, overDatabase} {
		if r := ask(how); r.code != cli.ExitFound || r.stderr != summary || !strings.Contains(r.stdout, "\nNever arrived: 2\n") || !strings.Contains(r.stdout, "\nk7 ") ||
			!strings.Contains(r.stdout, "\nEffect without event: 1\n") || strings.Contains(r.stdout, "\x1b") || !strings.Contains(r.stdout, "\nEffect twice: 1\n") || !strings.Contains(r.stdout, "\nProcessed, no effect: 1\n") {
			t.Errorf("%+v", r)
		}
		var report struct {
			NeverArrived []struct {
				Key     string `json:"key"`
				EventID string `json:"event_id"`
			} `json:"never_arrived"`
			NoEffect []any `json:"no_effect"`
			Missing  []any `json:"processed_no_effect"`
			Complete bool  `json:"complete"`
		}
		r := ask(how, "--json")
		if err := json.Unmarshal([]byte(r.stdout), &report); err != nil || r.code != cli.ExitFound || len(report.NeverArrived) != 2 || report.NeverArrived[0].EventID == "" ||
			report.NoEffect == nil || len(report.Missing) != 1 || !report.Complete {
			t.Errorf("%v %+v", err, r)
		}
	}

	if r := ask(overHTTP, "--heal"); r.code != cli.ExitUsage || !strings.HasSuffix(r.stderr, "outbox-relay: replay 2 deliveries to default; nothing was done: run the command on a terminal, where it asks first\n") ||
		!strings.Contains(r.stdout, "Never arrived: 2") {
		t.Errorf("%+v", r)
	}
	delivered(40)
	if r := ask(overHTTP, "--heal", "--yes", "--as=ann"); r.code != cli.ExitFound || !strings.Contains(r.stdout, "\nReplayed 2 deliveries. Run the command again when they are through.\n") ||
		!strings.Contains(r.stderr, `"action":"reconcile heal"`) {
		t.Errorf("%+v", r)
	}
	if r := command(c.env, "audit"); !strings.Contains(r.stdout, "replay") || !strings.Contains(r.stdout, "ann") {
		t.Errorf("%+v", r)
	}
	relaytest.Becomes(c.receiver, 2, `SELECT count(*)::int FROM effect WHERE key IN ('k7', 'k8')`)
	delivered(40)
	c.receiver.Exec(`DELETE FROM processed_events WHERE idempotency_key LIKE '%red'`)
	c.receiver.Exec(`INSERT INTO effect VALUES ('k10')`)
	if r := ask(overHTTP); r.code != cli.ExitFound || r.stderr != "outbox-relay: 1 effect twice\n" {
		t.Errorf("%+v", r)
	}
}

// What a comparison finds, or that it cannot be made, is an alert until a comparison finds nothing.
func TestReconcileAlerts(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	alerts := func(more ...string) string {
		t.Helper()
		command(c.env, append([]string{"reconcile", "--settle=1ms", "--alert"}, more...)...)
		return relaytest.Row[string](c.sender, `SELECT coalesce(string_agg(concat_ws('|', rule, subject, level, detail, CASE WHEN resolved_at IS NULL THEN 'open' ELSE 'ended' END), ';'), '') FROM outbox_alert`)
	}
	testkit.Equal(t, "nothing differs", alerts("--url="+c.url), "")
	c.receiver.Exec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('shop', 'billing', 'stranger', 'succeeded')`)
	if found := alerts("--url=" + c.url); found != "reconcile|default|1|1 effect without event|open" {
		t.Errorf("a difference: %q", found)
	}
	if r := command(c.env, "status"); !strings.Contains(r.stdout, `The comparison of "default" with its receiver has not passed: 1 effect without event. `) {
		t.Errorf("%+v", r)
	}
	if found := alerts("--url=http://127.0.0.1:1/"); !strings.HasPrefix(found, "reconcile|default|1|reconcile: ask the receiver to describe: http://127.0.0.1:1/: ") || !strings.HasSuffix(found, "|open") {
		t.Errorf("no answer: %q", found)
	}
	c.receiver.Exec(`DELETE FROM processed_events`)
	if found := alerts("--url=" + c.url); !strings.HasSuffix(found, "|ended") {
		t.Errorf("nothing differs any more: %q", found)
	}
}

// The events of a drill have no event at the sender, and whatever they do is in the drill's own
// report. They are left out, also where there are more of them than a list may name, but not an
// event of the sender that has such a key.
func TestReconcileLeavesDrillsOut(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	c.receiver.Exec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at)
		SELECT 'shop', 'billing', 'drill-abcdefghij-valid-' || i, 'failed', now() - interval '1 hour' FROM generate_series(1, 20) i`)
	if r := command(c.env, "drill", strings.TrimSuffix(c.url, "/reconcile"), "--only=valid,duplicate,key-case"); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	c.receiver.Exec(`INSERT INTO effect SELECT idempotency_key FROM processed_events`)
	drilled := pgtest.Row[int](t, c.receiver.Pool, `SELECT count(*)::int FROM processed_events`)
	c.receiver.Exec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) SELECT 'shop', 'billing', unnest(ARRAY['drill-7', 'z']), 'succeeded'`)
	c.sender.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key, created_at) VALUES ('paid', '{}', 'drill-abcdefghij-valid-99', now() - interval '3 hours')`)
	c.sender.Exec(`INSERT INTO outbox_delivery (event_id, destination, status, delivered_at) SELECT id, 'default', 'delivered', now() FROM outbox`)
	args := []string{"reconcile", "--url=" + c.url, "--settle=1ms", "--since=2h", "--limit=10"}
	want := fmt.Sprintf("  left out: %d of a drill\n", drilled)
	if r := command(c.env, args...); r.code != cli.ExitFound || !strings.Contains(r.stdout, want) || !strings.HasSuffix(r.stderr, "1 never arrived; 2 effect without event\n") ||
		!strings.Contains(r.stdout, "\ndrill-7 ") {
		t.Errorf("%+v", r)
	}
	if r := command(c.env, append(args, "--json")...); !strings.Contains(r.stdout, fmt.Sprintf(`"drilled": %d`, drilled)) {
		t.Errorf("%+v", r)
	}
}

// Each mistake is said before anything is compared, or as what it is.
func TestMistakesOfReconcile(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	c.receiver.Exec(`INSERT INTO processed_events (receiver, source, idempotency_key, processing_state) VALUES ('shop', 'billing', 'k', 'succeeded')`)
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/ok":
			_, _ = io.WriteString(w, "{}")
		case "/moved":
			http.Redirect(w, r, c.url, http.StatusTemporaryRedirect)
		case "/switches": // and says nothing more
			conn, _, err := http.NewResponseController(w).Hijack()
			relaytest.Must(t, err)
			t.Cleanup(func() { _ = conn.Close() })
			_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(elsewhere.Close)
	unsigned := []string{c.env[0], c.env[1]}
	foreign := append([]string{"OUTBOX_SIGNING_SECRET=" + receivertest.OtherText}, unsigned...)
	for _, test := range []struct {
		args string
		env  []string
		code int
		want string
	}{
		{"", c.env, cli.ExitUsage, "nothing says who is asked"},
		{"--url=" + c.url + " --receiver=shop", c.env, cli.ExitUsage, "--url and --receiver can't be used together"},
		{"--url=" + c.url + " --effects=x", c.env, cli.ExitUsage, "--effects: the receiver at --url counts by its own query"},
		{"--url=" + c.url + " --settle=soon", c.env, cli.ExitUsage, "--settle: "},
		{"--url=" + c.url + " --since=2026-01-02", c.env, cli.ExitUsage, "--since: "},
		{"--url=" + c.url + " --limit=1001", c.env, cli.ExitUsage, "--limit: 1001 is out of range; write 1 to 1000"},
		{"--url=" + c.url + " --yes", c.env, cli.ExitUsage, "--yes answers the question of --heal"},
		{"--url=" + c.url + " --destination=shpo", c.env, cli.ExitUsage, `--destination: "shpo" is not configured`},
		{"--url=ftp://x/", c.env, cli.ExitUsage, "--url: write one such as https://"},
		{"--url=https://u:secret@x/", c.env, cli.ExitUsage, "without a password"},
		{"--url=" + strings.TrimSuffix(c.url, "/reconcile"), c.env, cli.ExitUsage, "this is where default takes events"},
		{"--url=" + c.url, unsigned, cli.ExitConfig, "destinations.default.signing_secrets is not set"},
		{"--url=" + c.url, foreign, cli.ExitFailed, "/events/reconcile answered 401: The request's signature is not valid"},
		{"--url=" + elsewhere.URL + "/nothing", c.env, cli.ExitFailed, "/nothing answered 404: does the receiver answer reconcile there?"},
		{"--url=" + elsewhere.URL + "/ok", c.env, cli.ExitFailed, "/ok answered 200 without an answer"},
		{"--url=" + elsewhere.URL + "/moved", c.env, cli.ExitFailed, "/moved answered 307"},
		{"--url=" + elsewhere.URL + "/switches", c.env, cli.ExitFailed, "/switches answered 101"},
		{"--url=http://127.0.0.1:1/", c.env, cli.ExitFailed, "reconcile: ask the receiver to describe: http://127.0.0.1:1/: "},
		{"--receiver=shop", c.env[:2], cli.ExitConfig, "RECEIVER_DATABASE_URL is not set"},
		{"--receiver=shop", append(c.env[:3:3], "RECEIVER_DATABASE_URL=mysql://u:secret@x"), cli.ExitConfig, "RECEIVER_DATABASE_URL begins with another scheme"},
		{"--receiver=shop", append(c.env[:3:3], "RECEIVER_DATABASE_URL="+c.sender.DSN), cli.ExitSchema, "this is a producer's database"},
		{"--receiver=shop", c.env, cli.ExitUsage, `receiver "shop" has nothing from source "outbox"; there are: --receiver shop --source billing`},
		{`--receiver=shop --source=billing --effects=TABLE"efect"`, c.env, cli.ExitFailed, `relation "efect" does not exist (SQLSTATE 42P01); did you mean public.effect? Write it so in --effects, with its schema`},
		{`--receiver=shop --source=billing --effects=TABLE"zzzzzzzzz"`, c.env, cli.ExitFailed, "no table of this database has a name like it"},
		{"--receiver=shop --source=billing --effects=nonsense", c.env, cli.ExitFailed, "ask the receiver to doubled: count effects: ERROR: syntax error"},
	} {
		r := command(test.env, append([]string{"reconcile"}, strings.Fields(test.args)...)...)
		if r.code != test.code || !strings.Contains(r.stderr, test.want) || strings.Contains(r.stderr, "secret@") || r.stdout != "" {
			t.Errorf("%s: %+v, want %d %s", test.args, r, test.code, test.want)
		}
	}
}

// The roles that the documentation names are enough, and one that is not granted is named.
func TestReconcileNeedsReadersRights(t *testing.T) {
	t.Parallel()
	server := pgtest.StartCopy(t, localpg.Options{}) // roles belong to all of it
	pgtest.Migrate(t, server.DSN(""), migrations.Outbox, migrations.Inbox)
	conn, err := pgx.Connect(t.Context(), server.DSN(""))
	pgtest.Must(t, err)
	defer conn.Close(t.Context())
	for _, statement := range []string{
		migrations.Roles(), "CREATE ROLE reads LOGIN; CREATE ROLE supports LOGIN; GRANT outbox_reader TO reads",
		`INSERT INTO outbox (event_type, payload, idempotency_key, created_at) SELECT 'paid', '{}', k, now() - interval '2 hours' FROM unnest(ARRAY['k', 'lost']) k;
		 INSERT INTO outbox_delivery (event_id, destination, status, delivered_at) SELECT id, 'shop', 'delivered', now() - interval '1 hour' FROM outbox;
		 INSERT INTO processed_events (receiver, source, idempotency_key, processing_state, received_at) VALUES ('shop', 'billing', 'k', 'recorded', now() - interval '1 hour');
		 INSERT INTO inbox_events (receiver, source, idempotency_key, processing_state, inbox_id, received_at) VALUES ('shop', 'billing', 'k', 'failed', 1, now() - interval '1 hour')`,
	} {
		if _, err := conn.PgConn().Exec(t.Context(), statement).ReadAll(); err != nil {
			t.Fatal(err)
		}
	}
	as := func(name string) string {
		login, err := url.Parse(server.DSN(""))
		pgtest.Must(t, err)
		login.User = url.User(name)
		return login.String()
	}
	env := []string{"OUTBOX_DATABASE_URL=" + as("reads"), "RECEIVER_DATABASE_URL=" + as("supports")}
	args := []string{"reconcile", "--destination=shop", "--receiver=shop", "--source=billing", "--since=2000-01-01T00:00:00Z"}
	command(env, args...).holds(t, cli.ExitFailed, "", "GRANT inbox_support TO supports")
	if _, err := conn.Exec(t.Context(), "GRANT inbox_support TO supports"); err != nil {
		t.Fatal(err)
	}
	if r := command(env, args...); r.code != cli.ExitFound || r.stderr != "outbox-relay: 1 never arrived; 1 arrived, no effect\n" {
		t.Errorf("%+v", r)
	}
}
