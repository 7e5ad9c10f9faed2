package notify

import (
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/relay"

	"github.com/outbox-relay/outbox-relay/internal/notify/notifytest"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
)

var update = flag.Bool("update", false, "write the golden messages again")

// strays counts what was sent to the proxy that the environment names. No alert may go there.
var strays atomic.Int64

// authority has certified all services.
var authority = notifytest.NewAuthority()

// TestMain runs the tests in an environment whose proxy variables lead astray, and whose authority
// is that of the services.
func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	trap := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		strays.Add(1)
		w.WriteHeader(http.StatusTeapot)
	}))
	defer trap.Close()
	dir, err := os.MkdirTemp("", "notify")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	env := map[string]string{"SSL_CERT_FILE": filepath.Join(dir, "authority.pem")}
	if err := os.WriteFile(env["SSL_CERT_FILE"], authority.PEM, 0o600); err != nil {
		panic(err)
	}
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"} {
		env[name], env[strings.ToLower(name)] = trap.URL, trap.URL
	}
	for name, value := range env {
		_ = os.Setenv(name, value)
	}
	return m.Run()
}

// testedAt is when the alert was opened that is sent: its text names the second.
var testedAt = time.Now()

// notifyAll sends an alert to every service in a world whose services answer so. Each must return
// an error with a text; empty: none.
func notifyAll(t *testing.T, answers http.HandlerFunc, egress func(proxy string) relay.Egress, want string) *notifytest.World {
	t.Helper()
	t.Parallel()
	w := notifytest.New(t, authority, answers)
	transport, kinds := alert.NewTransport(egress(w.Proxy.URL)), map[string]bool{}
	for _, raw := range append(slices.Sorted(maps.Values(notifytest.ServiceURLs())), w.Mail.URL()) {
		kinds[Kind(raw)] = true
		secret, problem := ParseURL(raw)
		err := New(secret, transport).Notify(t.Context(), alert.NewTest(testedAt))
		switch {
		case problem != "":
			t.Errorf("%s %s", raw, problem)
		case want == "" && err != nil, want != "" && (err == nil || !strings.Contains(err.Error(), want)) && Kind(raw) != "smtp":
			t.Errorf("%s: %v", raw, err)
		}
	}
	if len(kinds) != len(Services()) {
		t.Errorf("%d of %d services were tried", len(kinds), len(Services()))
	}
	testkit.Equal(t, "requests went to the proxy of the environment", strays.Load(), 0)
	return w
}

func proxied(proxy string) relay.Egress { return relay.Egress{Proxy: proxy} }

// Every service is sent what the golden messages hold, through the proxy of egress and never the
// environment's.
func TestMessages(t *testing.T) {
	w := notifyAll(t, nil, proxied, "")
	var all strings.Builder
	for _, host := range slices.Sorted(maps.Keys(notifytest.ServiceURLs())) {
		for _, m := range w.Messages()[host] {
			fmt.Fprintf(&all, "%s https://%s%s?%s %s%s\n", m.Method, host, m.Path, m.Query, strings.ReplaceAll(m.Headers, "\n", "; "), m.Body)
		}
	}
	text := alert.NewTest(testedAt).Text()
	got := strings.NewReplacer(text, "TEXT", url.QueryEscape(text), "TEXT", "Content-Type: ", "").Replace(all.String())
	got = regexp.MustCompile(`"(sign|timestamp)":"[^"]+"`).ReplaceAllString(got, `"$1":"…"`)
	const golden = "testdata/messages.txt"
	if *update {
		testkit.Must(t, os.WriteFile(golden, []byte(got), 0o600))
	}
	if want, err := os.ReadFile(golden); err != nil || string(want) != got {
		t.Errorf("%v: sent were\n%s", err, got)
	}
	mails := w.Mail.All()
	if len(mails) != 1 {
		t.Fatalf("%d mails", len(mails))
	}
	if subject, body := notifytest.ParseMail(t, mails[0]); subject != "outbox-relay: test test: firing" || strings.TrimSpace(body) != text {
		t.Errorf("the mail is %q: %s", subject, body)
	}
}

func TestSecurityRedirectsAreNotFollowed(t *testing.T) {
	var followed atomic.Int64
	elsewhere := serve(t, func(http.ResponseWriter, *http.Request) { followed.Add(1) })
	notifyAll(t, func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Location", elsewhere.URL+r.URL.Path)
		rw.WriteHeader(http.StatusTemporaryRedirect)
	}, proxied, "redirects are never followed")
	testkit.Equal(t, "redirects followed", followed.Load(), 0)
}

func TestRefusals(t *testing.T) {
	notifyAll(t, func(rw http.ResponseWriter, _ *http.Request) {
		rw.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(rw, "<html>")
	}, proxied, "the channel answered 403 Forbidden: <html>")
}

// The name of this host, and so of the proxy before every service, leads to an address that may not
// be dialled.
func TestSecurityNamesOfForbiddenAddresses(t *testing.T) {
	w := notifyAll(t, nil, func(proxy string) relay.Egress {
		return relay.Egress{Proxy: strings.Replace(proxy, "127.0.0.1", "localhost", 1), AllowPrivate: []netip.Prefix{}}
	}, "egress.allow_private")
	if reached, mails := w.Messages(), w.Mail.All(); len(reached)+len(mails) != 0 {
		t.Errorf("reached were %v, %q", reached, mails)
	}
}

// An incident of PagerDuty is closed by the recovery of the alert that opened it.
func TestIncidents(t *testing.T) {
	t.Parallel()
	w := notifytest.New(t, authority, nil)
	channel := New("pagerduty://pagerduty.test/0123456789abcdef0123456789abcdef", alert.NewTransport(proxied(w.Proxy.URL)))
	resolved := time.Now()
	for _, at := range []*time.Time{nil, &resolved} {
		if err := channel.Notify(t.Context(), alert.Alert{Rule: "failed", Subject: "logistics", ResolvedAt: at}); err != nil {
			t.Error(err)
		}
	}
	for i, action := range []string{"trigger", "resolve"} {
		body := w.Messages()["pagerduty.test"][i].Body
		testkit.Contains(t, "found", body, `"event_action":"`+action+`"`, `"dedup_key":"outbox-relay/failed/logistics"`)
	}
	for _, odd := range []string{"a b", strings.Repeat("x", 256), "Upper"} {
		if key := incidentKey(odd); !strings.HasPrefix(key, "outbox-relay-") || len(key) > 255 || key != incidentKey(odd) {
			t.Errorf("%s became %s", odd, key)
		}
	}
}
