package elsewhere

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

type testCase struct {
	name string
	test func(t *testing.T, r *receiver)
}

// Every receiver has to do the same, one case after the other in one process, with its keys apart.
var cases = []testCase{
	{"first and duplicate", firstAndDuplicate},
	{"signatures", signatures},
	{"headers", headers},
	{"bodies", bodies},
	{"unfinished body", unfinishedBody},
	{"known otherwise", knownOtherwise},
	{"failing handlers", failingHandlers},
	{"careless handlers", carelessHandlers},
	{"in flight", inFlight},
	{"forgotten", forgotten},
	{"killed after the effect", killedAfterTheEffect},
	{"killed while committing", killedWhileCommitting},
	{"database trouble", databaseTrouble},
	{"beside a receiver in Go", besideGo},
	{"drilled", drilled},
}

func TestReceiversElsewhere(t *testing.T) {
	if *nodeModules == "" {
		t.Skip("run these by: make test-elsewhere")
	}
	server := pgtest.Start(t, localpg.Options{ListenTCP: true})
	for _, l := range languages {
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			newReceiver(t, server, l).try(t, slices.Concat(cases, questions))
		})
	}
	t.Run("go", func(t *testing.T) {
		t.Parallel()
		newGoReceiver(t, server).try(t, questions)
	})
}

func (r *receiver) try(t *testing.T, cases []testCase) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) { c.test(t, r) })
	}
}

func firstAndDuplicate(t *testing.T, r *receiver) {
	body := invoice("INV-1")
	wantFirst(t, r.send(t, "k1", body, signing{}))
	wantDuplicate(t, r.send(t, "k1", body, signing{}), 204)
	r.wantRows(t, "k1", "INV-1", 1, 1)

	var as bool
	hash := sha256.Sum256([]byte(body))
	err := r.pool.QueryRow(t.Context(), `SELECT (event_type, event_version, related_reference, event_id, destination, processing_state, response_status)
		= ('invoice.created', 1, 'INV-4711', 4711, 'logistics-1', 'succeeded', 204) AND payload_hash = $1
		AND not_after BETWEEN now() + interval '29 days' AND now() + interval '30 days' AND processed_at IS NOT NULL
		FROM processed_events WHERE idempotency_key = 'k1'`, hash[:]).Scan(&as)
	if err != nil || !as {
		t.Errorf("the row is not what the document says: %v", err)
	}

	// A later promise of the sender is kept, an earlier one is not.
	later := time.Now().Add(1000 * time.Hour)
	wantDuplicate(t, r.send(t, "k1", body, signing{change: set(webhook.NotAfter, stamp(later))}), 204)
	wantDuplicate(t, r.send(t, "k1", body, signing{change: func(h http.Header) { delete(h, webhook.NotAfter) }}), 204)
	var kept time.Time
	if err := r.pool.QueryRow(t.Context(), "SELECT not_after FROM processed_events WHERE idempotency_key = 'k1'").Scan(&kept); err != nil ||
		!kept.Equal(later.Truncate(time.Microsecond)) {
		t.Errorf("not_after is %v (%v), want %v", kept, err, later)
	}

	// Another receiver has answered otherwise; Once has answered nothing.
	r.exec(t, `INSERT INTO processed_events (receiver, source, idempotency_key, payload_hash, processing_state, response_status)
		VALUES ('shipping', 'finance', 'k1 other', $1, 'ignored', 202), ('shipping', 'finance', 'k1 once', NULL, 'succeeded', NULL),
		       ('billing', 'finance', 'k1 new', $1, 'succeeded', 204)`, hash[:])
	wantDuplicate(t, r.send(t, "k1 other", body, signing{}), 202)
	wantDuplicate(t, r.send(t, "k1 once", body, signing{}), 200)
	r.wantRows(t, "k1", "INV-1", 1, 1)
	wantFirst(t, r.send(t, "k1 new", body, signing{}))
}

// wantOne asserts that one of many requests ran the handler, and that the others were answered by
// its status or refused.
func wantOne(t *testing.T, answers []<-chan answer) {
	t.Helper()
	first := 0
	for _, answers := range answers {
		switch got := <-answers; {
		case got.status == 204 && got.replay == "":
			first++
		case got.status == 204:
		default:
			wantProblem(t, got, 409, "in-flight")
		}
	}
	testkit.Equal(t, "requests were answered as the first", first, 1)
}

// signatures are what the drill does not send, and one of each problem.
func signatures(t *testing.T, r *receiver) {
	const key, number = "k3", "INV-3"
	v1 := func(h http.Header) {
		h[webhook.Signature] = []string{strings.Fields(h.Get(webhook.Signature))[0]}
	}
	for name, c := range map[string]struct {
		signing
		want string
	}{
		"v1 alone":            {signing{tamper: v1}, "signature-invalid"},
		"type and a blank":    {signing{tamper: set(webhook.EventType, "invoice.created\xa0")}, "signature-invalid"},
		"a header repeated":   {signing{tamper: func(h http.Header) { h.Add(webhook.EventID, "4711") }}, "signature-invalid"},
		"another tenant":      {signing{tamper: set("X-Event-Tenant", "b")}, "signature-invalid"},
		"a tenant more":       {signing{tamper: func(h http.Header) { h.Add("X-Event-Tenant", "a") }}, "signature-invalid"},
		"another header":      {signing{tamper: set("X-Event-Role", "admin")}, "signature-invalid"},
		"another ce-type":     {signing{tamper: set("Ce-Type", "invoice.paid")}, "signature-invalid"},
		"another destination": {signing{tamper: set(webhook.Destination, "archive")}, "signature-invalid"},
		"timestamp of a word": {signing{tamper: set(webhook.Timestamp, "now")}, "signature-invalid"},
		"stale":               {signing{at: time.Now().Add(-6 * time.Minute)}, "timestamp-out-of-tolerance"},
	} {
		t.Run(name, func(t *testing.T) { wantProblem(t, r.send(t, key, invoice(number), c.signing), 401, c.want) })
	}
	r.wantRows(t, key, number, 0, 0)
	wantFirst(t, r.send(t, key, invoice(number), signing{tamper: func(h http.Header) {
		h[webhook.Signature] = []string{"x1,AAAA v2,x " + h.Get(webhook.Signature)}
	}}))
}

func headers(t *testing.T, r *receiver) {
	body := invoice("INV-4")
	wantProblem(t, r.send(t, "k4", body, signing{tamper: func(h http.Header) { delete(h, webhook.IdempotencyKey) }}), 400, "key-missing")
	wantProblem(t, r.send(t, "k4", body, signing{tamper: func(h http.Header) { h.Add(webhook.IdempotencyKey, "k4") }}), 400, "key-repeated")
	for name, value := range map[string]string{
		webhook.IdempotencyKey: strings.Repeat("k", 256), webhook.EventID: "-1", webhook.CreatedAt: "yesterday", webhook.EventVersion: "one",
	} {
		wantProblem(t, r.send(t, "k4", body, signing{change: set(name, value)}), 400, "header-invalid")
	}
	r.wantRows(t, "k4", "INV-4", 0, 0)

	// A monitor or a scanner may ask by another method. Node.js answers it by itself.
	asked, err := request(t.Context(), r.url, "k4", body, signing{})
	pgtest.Must(t, err)
	asked.Method = http.MethodOptions
	if got, err := r.do(asked); err != nil || got.status == http.StatusNoContent {
		t.Errorf("by OPTIONS an event got %+v %v", got, err)
	}
	r.wantRows(t, "k4", "INV-4", 0, 0)

	// A proxy, or an attacker, may put blanks around a value. They are not part of it.
	wantFirst(t, r.send(t, "k4", body, signing{}))
	var text bytes.Buffer
	request, err := request(t.Context(), r.url, "k4", body, signing{})
	if err == nil {
		err = request.Write(&text)
	}
	pgtest.Must(t, err)
	padded := strings.Replace(text.String(), "X-Idempotency-Key: k4\r\n", "X-Idempotency-Key: \t k4 \t \r\n", 1)
	padded = strings.Replace(padded, "X-Event-Tenant: a\r\n", "X-Event-Tenant:   a \t\r\n", 1)
	if got := r.raw(t, padded, ""); !strings.HasPrefix(got, "HTTP/1.1 204") || !strings.Contains(strings.ToLower(got), "idempotency-replayed: true") {
		t.Errorf("with blanks around its key a duplicate got %q", got)
	}
	r.wantRows(t, "k4", "INV-4", 1, 1)
}

// raw sends text, and then the rest a byte at a time. It returns the status and the headers of the
// answer, or nothing if the connection was closed without one.
func (r *receiver) raw(t *testing.T, text, rest string) (head string) {
	t.Helper()
	to, err := url.Parse(r.url)
	pgtest.Must(t, err)
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", to.Host)
	pgtest.Must(t, err)
	pgtest.Must(t, conn.SetDeadline(time.Now().Add(patience)))
	if _, err := fmt.Fprint(conn, text); err != nil {
		t.Fatal(err)
	}
	var dripping sync.WaitGroup
	dripping.Go(func() {
		drops := time.NewTicker(100 * time.Millisecond)
		defer drops.Stop()
		for i := range len(rest) {
			<-drops.C
			if _, err := fmt.Fprint(conn, rest[i:i+1]); err != nil {
				return // answered
			}
		}
	})
	defer dripping.Wait()
	defer conn.Close()
	lines := bufio.NewScanner(conn)
	for lines.Scan() && lines.Text() != "" {
		head += lines.Text() + "\n"
	}
	if errors.Is(lines.Err(), os.ErrDeadlineExceeded) {
		t.Fatal("the receiver neither answers nor closes the connection")
	}
	return head
}

func bodies(t *testing.T, r *receiver) {
	const limit = 1 << 20
	larger := invoice("INV-5")
	larger += strings.Repeat(" ", limit+1-len(larger))
	wantProblem(t, r.send(t, "k5 larger", larger, signing{}), 413, "body-too-large")
	wantProblem(t, r.send(t, "k5 empty", "", signing{}), 422, "permanent-failure")
	r.wantRows(t, "k5 larger", "INV-5", 0, 0)
	r.wantRows(t, "k5 empty", "INV-5", 0, 0)
}

func unfinishedBody(t *testing.T, r *receiver) {
	number := strings.Repeat("6", 2000)
	body := invoice(number)
	request, err := request(t.Context(), r.url, "k6", body, signing{})
	pgtest.Must(t, err)
	var text bytes.Buffer
	pgtest.Must(t, request.Write(&text))
	begun, rest := text.String()[:text.Len()-len(body)], body // it never stops for long, and takes minutes
	if got := r.raw(t, begun, rest); got != "" && !strings.HasPrefix(got, "HTTP/1.1 408") {
		t.Errorf("a request without its end got %q", got) // the JDK's server can only close the connection
	}
	r.wantRows(t, "k6", number, 0, 0)
	wantFirst(t, r.send(t, "k6", body, signing{}))
}

func knownOtherwise(t *testing.T, r *receiver) {
	wantFirst(t, r.send(t, "k7", invoice("INV-7"), signing{}))
	wantProblem(t, r.send(t, "k7", invoice("INV-7 other"), signing{}), 422, "key-reused")
	other := set(webhook.Destination, "archive")
	wantProblem(t, r.send(t, "k7", invoice("INV-7"), signing{change: other}), 421, "other-destination")
	wantProblem(t, r.send(t, "k7", invoice("INV-7 other"), signing{change: other}), 421, "other-destination")
	wantDuplicate(t, r.send(t, "k7", invoice("INV-7"), signing{change: func(h http.Header) { delete(h, webhook.Destination) }}), 204)
	r.wantRows(t, "k7", "INV-7", 1, 1)
	r.wantRows(t, "k7", "INV-7 other", 0, 1)
}

func failingHandlers(t *testing.T, r *receiver) {
	for number, problem := range map[string]string{"FAIL-8": "handler-failed", "COMMIT-FAIL-8": "commit-failed"} {
		wantProblem(t, r.send(t, number, invoice(number), signing{}), 500, problem)
		r.wantRows(t, number, number, 0, 0)
	}
	r.exec(t, "INSERT INTO fixed VALUES (true)")
	for _, number := range []string{"FAIL-8", "COMMIT-FAIL-8"} {
		wantFirst(t, r.send(t, number, invoice(number), signing{}))
		wantDuplicate(t, r.send(t, number, invoice(number), signing{}), 204)
		r.wantRows(t, number, number, 1, 1)
	}
	for _, body := range []string{`{"invoice":`, `[]`, `{"invoice":"INV-8"}`} {
		wantProblem(t, r.send(t, "k8", body, signing{}), 422, "permanent-failure")
	}
	wantProblem(t, r.send(t, "k8", invoice("INV-8"), signing{change: set(webhook.EventType, "invoice.unheard")}), 422, "event-unknown")
	r.wantRows(t, "k8", "INV-8", 0, 0)
}

// Each block of code in the document stands in the package of its language, line by line.
func TestDocumentShowsTheHandlers(t *testing.T) {
	t.Parallel()
	const name = "../../docs/receiving-elsewhere.md"
	document, err := os.ReadFile(name)
	pgtest.Must(t, err)
	for _, l := range languages {
		source, err := os.ReadFile(filepath.Join(l.name, l.file))
		pgtest.Must(t, err)
		blocks := strings.Split(string(document), "```"+l.fence+"\n")[1:]
		if len(blocks) == 0 {
			t.Errorf("%s shows no %s", name, l.name)
		}
		for _, block := range blocks {
			block, _, _ = strings.Cut(block, "```")
			if !strings.Contains(string(source), block) {
				t.Errorf("%s: %s has no\n%s", name, l.name, block)
			}
		}
	}
}
