package main

import (
	"fmt"
	"html"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/migrations"
)

var byHand = regexp.MustCompile(`(?s)<pre id="curl-[^"]*"[^>]*>(.*?)</pre>`)

// What the page prints to send an event by hand can be run as it stands: once by the relay, signed,
// and once by curl. Both requests say the same, down to the bytes of the payload.
func TestSendByHand(t *testing.T) {
	t.Parallel()
	for _, tool := range []string{"jq", "curl"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip("install " + tool)
		}
	}
	var mu sync.Mutex
	var got []string
	signed := 0
	receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		text := fmt.Sprint(r.Method, r.URL.Path, err, string(body))
		for _, name := range []string{"Content-Type", webhook.IdempotencyKey, webhook.EventType, webhook.EventVersion, webhook.EventID, webhook.CreatedAt, webhook.OrderingKey, webhook.RelatedReference} {
			text += "\n" + name + ": " + r.Header.Get(name)
		}
		mu.Lock()
		defer mu.Unlock()
		got = append(got, text)
		if r.Header.Get(webhook.Signature) != "" {
			signed++
		}
	}))
	defer receiver.Close()
	count := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(got)
	}
	dsn := pgtest.New(t, migrations.Outbox)
	db := open(t, dsn)
	s := start(t, []string{
		"OUTBOX_DATABASE_URL=" + dsn, "OUTBOX_DESTINATION_URL=" + receiver.URL + "/webhooks/finance", "OUTBOX_SIGNING_SECRET=" + goodSecret,
		"OUTBOX_ADMIN_LISTEN=127.0.0.1:0", "OUTBOX_ADMIN_TOKEN=" + pageToken, "OUTBOX_ADMIN_PATH_PREFIX=/outbox",
	}, "--poll-interval=1s")
	c := s.console(t)
	execute(t, db, `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, related_reference)
		VALUES ('invoice.paid', '{"n":  1.50, "text": "it''s \u00e9 $HOME \\n"}', 'key ''of'' $1', 'order "7"', 'INV-1 & 2')`)
	testkit.Eventually(t, "the delivery", func() bool { return count() == 1 })
	until(t, db, `SELECT count(*) = 1 FROM outbox_delivery WHERE status = 'delivered'`)
	_, body := c.send("GET", "/events/1", nil)
	printed := byHand.FindStringSubmatch(body)
	if printed == nil {
		t.Fatalf("the page prints nothing to send the event by hand:\n%s", body)
	}

	script := strings.Replace(html.UnescapeString(printed[1]), "outbox-relay replay ", "outbox-relay replay --yes ", 1) // nobody is there to be asked
	dir := t.TempDir()
	pgtest.Must(t, os.WriteFile(filepath.Join(dir, "outbox-relay"), []byte("#!/bin/sh\nexec '"+os.Args[0]+"' \"$@\"\n"), 0o700))
	shell := exec.CommandContext(t.Context(), "sh", "-euc", script)
	shell.Env = append(os.Environ(), asProgram+"=1", "OUTBOX_DATABASE_URL="+dsn, "PATH="+dir+":"+os.Getenv("PATH"))
	if out, err := shell.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s\n%s", err, out, script)
	}
	testkit.Eventually(t, "both requests", func() bool { return count() == 3 })
	mu.Lock()
	defer mu.Unlock()
	for _, again := range got[1:] {
		if again != got[0] {
			t.Errorf("sent by hand\n%s\nby the relay\n%s", again, got[0])
		}
	}
	if signed != 2 || !strings.Contains(got[0], `{"n":  1.50, `) {
		t.Errorf("%d of 3 are signed, %s", signed, got[0])
	}
	s.end(t, 0)
}
