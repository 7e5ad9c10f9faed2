package relay

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// smuggled is a second request, as an attacker writes it into the first one.
const smuggled = "\r\nX-Smuggled: yes\r\n\r\nGET /admin HTTP/1.1\r\nHost: internal\r\nX-Smuggled: yes\r\n\r\n"

// producer returns the database as a login sees it that has a producer's rights and no others.
func (db *database) producer() *database {
	db.Helper()
	script, err := os.ReadFile("../migrations/roles.sql")
	must(db, err)
	rolesLock.Lock()
	defer rolesLock.Unlock()
	db.exec(string(script))
	db.exec(`DO $$ BEGIN
		IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'attack_producer') THEN CREATE ROLE attack_producer LOGIN IN ROLE outbox_producer; END IF;
	END $$`)
	u, err := url.Parse(db.dsn)
	must(db, err)
	u.User = url.User("attack_producer")
	return &database{TB: db.TB, dsn: u.String(), pool: pgtest.Pool(db, u.String())}
}

// No column of an event makes one request into two, or adds a header. A producer cannot even insert such an event; and when
// the constraints are gone, such as in a table that was restored without them, the relay sends none of it.
func TestSecuritySmuggling(t *testing.T) {
	t.Parallel()
	columns := []string{"event_type", "idempotency_key", "ordering_key", "related_reference", "headers", "payload"}
	attacks := map[string][]string{}
	for _, column := range columns[:4] {
		attacks[column] = []string{
			"a" + smuggled, "a\nX-Smuggled: yes", "a\rX-Smuggled: yes", "a\r\n\tX-Smuggled: yes", "a\u0085X-Smuggled: yes", "a\u2028X-Smuggled: yes",
			"a\u560d\u560aX-Smuggled: yes", // whose low bytes are CR and LF
			"a\x0bX-Smuggled: yes", "a\x00X-Smuggled: yes", "a\x7f", " a", "a ", "\t", strings.Repeat("a", 256), strings.Repeat("a", 100_000),
		}
	}
	attacks["headers"] = []string{
		`{"X": "a\r\nX-Smuggled: yes"}`, `{"X": "a\nX-Smuggled: yes"}`, `{"X": "a\r\n\r\nGET /admin HTTP/1.1\r\n\r\n"}`, `{"X\r\nX-Smuggled": "yes"}`,
		`{"X: y\r\nX-Smuggled": "yes"}`, `{"X-Smuggled: yes\r\nX": "y"}`, `{"X ": "y"}`, `{" X": "y"}`, `{"X:": "y"}`, `{"": "X-Smuggled: yes"}`, `{"X": "\u560d\u560aX-Smuggled: yes"}`,
		`{"X": "a\u0000"}`, `{"X": "a\u000b"}`, `{"X": ["a", "X-Smuggled: yes"]}`, `{"X": {"X-Smuggled": "yes"}}`, `["X-Smuggled: yes"]`, `"X-Smuggled: yes"`,
		`{"Transfer-Encoding": "chunked"}`, `{"transfer_encoding": "chunked"}`, `{"Content-Length": "0"}`, `{"CONTENT-LENGTH": "5"}`, `{"Host": "internal"}`,
		`{"Connection": "X-Idempotency-Key"}`, `{"Upgrade": "h2c"}`, `{"Expect": "100-continue"}`, `{"Trailer": "X-Smuggled"}`, `{"TE": "trailers"}`,
		`{":authority": "internal"}`, `{"X-Idempotency-Key": "of another"}`, `{"Webhook-Signature": "v1,forged"}`,
		`{"X": "` + strings.Repeat("a", 100_000) + `"}`,
	}
	db := newDatabase(t)
	producer := db.producer()
	insert := func(by *database, key, column, value string) error {
		event := map[string]string{"event_type": "t", "payload": `{"n": 1}`, "idempotency_key": key}
		event[column] = value
		_, err := by.pool.Exec(t.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, related_reference, headers)
			VALUES ($1, $2::text::json, $3, $4, $5, coalesce($6::text::jsonb, '{}'))`,
			event["event_type"], event["payload"], event["idempotency_key"], orNull(event["ordering_key"]), orNull(event["related_reference"]), orNull(event["headers"]))
		return err
	}
	refused := 0
	for _, column := range columns {
		for _, value := range attacks[column] {
			refused++
			if _, ok := errors.AsType[*pgconn.PgError](insert(producer, fmt.Sprintf("attack-%d", refused), column, value)); !ok {
				t.Errorf("a producer inserts %s %.60q", column, value)
			}
		}
	}
	db.unruled()
	keys := map[string]bool{}
	inserted := 0
	for _, column := range columns {
		for _, value := range attacks[column] {
			inserted++
			key := fmt.Sprintf("attack-%d", inserted)
			keys[key] = insert(db, key, column, value) == nil // NUL is none of PostgreSQL's characters
		}
	}
	// What belongs into a body stays there.
	for i, payload := range []string{"{}" + strings.Repeat("\r\n", 1000), "\r\n\r\n[1]\r\n\r\n", `"0\r\n\r\nGET /admin HTTP/1.1\r\n\r\n"`, "0\r\n\r\n", "[\r\n]\r\n"} {
		key := fmt.Sprintf("body-%d", i)
		keys[key] = true
		must(t, insert(db, key, "payload", payload))
	}

	wire := newRecorder(t)
	r := start(t, db.config(to(wire.url)))
	becomes(db, 0, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'pending'`)
	r.stop()
	t.Logf("%d inserts refused; of %d rows, %d requests", refused, row[int](db, `SELECT count(*)::int FROM outbox`), len(wire.all()))
	for _, req := range wire.all() {
		key := req.header.Get(webhook.IdempotencyKey)
		switch {
		case req.method != http.MethodPost || req.target != "/" || req.host != strings.Trim(strings.TrimPrefix(wire.url, "http:"), "/"):
			t.Errorf("a request of another's making: %s %s at %s", req.method, req.target, req.host)
		case req.header.Get("X-Smuggled") != "" || !keys[key] && !strings.HasPrefix(key, strings.Repeat("a", 256)):
			t.Errorf("%.80q came with %v", key, req.header)
		case slices.Contains(req.header.Values("Host"), "internal"), len(req.header.Values(webhook.IdempotencyKey)) != 1:
			t.Errorf("%v", req.header)
		}
		if want := row[string](db, `SELECT payload::text FROM outbox WHERE idempotency_key = $1`, key); want != string(req.body) {
			t.Errorf("%s arrives with %q, want %q", key, req.body, want)
		}
	}
	if n := row[int](db, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'failed' AND last_reason <> 'invalid_event'`); n > 0 {
		t.Errorf("%d failed for another reason", n)
	}
}

func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// A recorder reads what arrives with nothing but a loop, and answers each request that it finds.
type recorder struct {
	*rawServer
	mu       sync.Mutex
	requests []request
}

func newRecorder(t testing.TB) *recorder {
	rec := &recorder{}
	rec.rawServer = newRawServer(t, func(conn net.Conn) {
		reader := bufio.NewReader(conn)
		for {
			req, err := http.ReadRequest(reader)
			if err != nil {
				if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && !strings.Contains(err.Error(), "reset") {
					t.Errorf("no request: %v", err)
				}
				return
			}
			var body bytes.Buffer
			if _, err := io.Copy(&body, req.Body); err != nil {
				t.Errorf("no body: %v", err)
				return
			}
			rec.mu.Lock()
			rec.requests = append(rec.requests, request{method: req.Method, target: req.RequestURI, host: req.Host, header: req.Header, body: body.Bytes()})
			rec.mu.Unlock()
			if _, err := io.WriteString(conn, "HTTP/1.1 204 No Content\r\n\r\n"); err != nil {
				return
			}
		}
	})
	return rec
}

func (rec *recorder) all() []request {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	return slices.Clone(rec.requests)
}
