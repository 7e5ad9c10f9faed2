package main

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"maps"
	"math/big"
	"mime/quotedprintable"
	"net"
	"net/http"
	"net/http/httptest"
	"net/mail"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/alert"
	"github.com/outbox-relay/outbox-relay/internal/notify"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// serviceURLs has a channel of every service that is offered, by the host that it talks to. Mail has a server of its own.
var serviceURLs = map[string]string{
	"bark.test":                "bark://:device-key@bark.test/",
	"discord.com":              "discord://token@123456789",
	"chat.googleapis.com":      "googlechat://chat.googleapis.com/v1/spaces/FOO/messages?key=bar&token=baz",
	"gotify.test":              "gotify://gotify.test/" + gotifyToken,
	"hangouts.test":            "hangouts://hangouts.test/v1/spaces/FOO/messages?key=bar&token=baz",
	"maker.ifttt.com":          "ifttt://dummy-key/?events=event1",
	"joinjoaomgcd.appspot.com": "join://Token:apikey@join?devices=dev1",
	"open.larksuite.com":       "lark://open.larksuite.com/token?secret=sss",
	"matrix.test":              "matrix://user:password@matrix.test/?rooms=!r:x",
	"mattermost.test":          "mattermost://bot@mattermost.test/token/channel",
	"notifiarr.com":            "notifiarr://apikey123?channel=123456789",
	"ntfy.test":                "ntfy://ntfy.test/topic",
	"opsgenie.test":            "opsgenie://opsgenie.test/eb243592-faa2-4ba2-a551q-1afdf565c889",
	"pagerduty.test":           "pagerduty://pagerduty.test/0123456789abcdef0123456789abcdef",
	"api.pushbullet.com":       "pushbullet://tokentokentokentokentokentokentoke/device",
	"api.pushover.net":         "pushover://shoutrrr:apptoken@usertoken",
	"rocketchat.test":          "rocketchat://bot@rocketchat.test/aaaaaaaaaa/bbbbbbbbbb/channel",
	"signal.test":              "signal://signal.test/+1234567890/+0987654321",
	"hooks.slack.com":          "slack://hook:AAAAAAAAA-BBBBBBBBB-123456789123456789123456@webhook",
	"test.webhook.office.com":  "teams://11111111-4444-4444-8444-cccccccccccc@22222222-4444-4444-8444-cccccccccccc/33333301222222222233333333333344/44444444-4444-4444-8444-cccccccccccc/V2?host=test.webhook.office.com",
	"api.telegram.org":         "telegram://12345:mock-token@telegram/?chats=channel-1&parsemode=Markdown",
	"qyapi.weixin.qq.com":      "wecom://693axxx6-7aoc-4bc4-97a0-0ec2sifa5aaa",
	"zulip.test":               "zulip://bot-name%40zulipchat.com:correcthorsebatterystable@zulip.test?stream=foo&topic=bar",
}

// A message is the parts of a request that say anything.
type message struct{ query, body, headers string }

// A world is all services in one: a proxy that leads to a server which has the names of them all.
type world struct {
	proxy, trap *httptest.Server
	authority   string // file of the server's certificate
	mail        *mailServer

	mu     sync.Mutex
	bodies map[string][]message // by host
	stray  []string             // what the trap was sent
}

func newWorld(t *testing.T, answers http.HandlerFunc) *world {
	t.Helper()
	w := &world{bodies: map[string][]message{}, mail: newMailServer(t)}
	w.trap = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.stray = append(w.stray, r.Method+" "+r.Host+r.URL.Path)
		rw.WriteHeader(http.StatusTeapot)
	}))
	answer := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		headers := "" // ntfy has its title there
		for _, values := range r.Header {
			headers += strings.Join(values, "\n") + "\n"
		}
		host, _, _ := strings.Cut(r.Host, ":")
		w.mu.Lock()
		w.bodies[host] = append(w.bodies[host], message{r.URL.RawQuery, string(body), headers})
		w.mu.Unlock()
		switch {
		case answers != nil:
			answers(rw, r)
		case host == "hooks.slack.com":
			_, _ = io.WriteString(rw, "ok")
		case host == "api.pushbullet.com":
			_, _ = fmt.Fprintf(rw, `%s, "active": true}`, body[:bytes.LastIndexByte(body, '}')])
		case host == "discord.com":
			rw.WriteHeader(http.StatusNoContent)
		case host == "pagerduty.test", host == "opsgenie.test":
			rw.WriteHeader(http.StatusAccepted)
		case host == "signal.test":
			rw.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(rw, `{"timestamp": 1}`)
		default:
			code := map[string]int{"bark.test": 200}[host]
			_, _ = fmt.Fprintf(rw, `{"ok": true, "result": {}, "status": 1, "code": %d, "errcode": 0, "id": 1, "success": true, "message": "success",
				"room_id": "!r:x", "joined_rooms": ["!r:x"], "access_token": "token", "home_server": "x", "user_id": "u", "type": "note", "active": true,
				"flows": [{"type": "m.login.password"}]}`, code)
		}
	})
	secure := httptest.NewUnstartedServer(answer)
	var pair tls.Certificate
	pair, w.authority = serverCertificate(t, slices.Collect(maps.Keys(serviceURLs)))
	secure.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	secure.StartTLS()
	w.mail.tls = secure.TLS
	w.proxy = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect {
			answer(rw, r)
			return
		}
		onward, err := net.Dial("tcp", secure.Listener.Addr().String())
		if err != nil {
			return
		}
		defer onward.Close()
		rw.WriteHeader(http.StatusOK)
		conn, buffered, err := rw.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		go func() {
			_, _ = io.Copy(onward, buffered)
			_ = onward.Close()
		}()
		_, _ = io.Copy(conn, onward)
	}))
	t.Cleanup(func() {
		for _, server := range []*httptest.Server{secure, w.proxy, w.trap} {
			server.CloseClientConnections()
			server.Close()
		}
	})
	return w
}

// serverCertificate makes a certificate for hosts, and the file of the authority behind it.
func serverCertificate(t *testing.T, hosts []string) (pair tls.Certificate, file string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "services"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, DNSNames: append(hosts, "localhost"), KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, writeFile(t, filepath.Join(t.TempDir(), "authority.pem"), string(text))
}

// configuration returns a file with a channel of every service, and egress.
func (w *world) configuration(t *testing.T, egress string) string {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "egress: %s\nalerts:\n  channels:\n  - {service: %q}\n", egress, w.mail.url())
	for _, host := range slices.Sorted(maps.Keys(serviceURLs)) {
		fmt.Fprintf(&b, "  - {service: %q}\n", serviceURLs[host])
	}
	return writeFile(t, filepath.Join(t.TempDir(), usualFile), b.String())
}

// environment is that of a process whose every proxy variable leads into the trap.
func (w *world) environment() []string {
	env := append(os.Environ(), asProgram+"=1", "SSL_CERT_FILE="+w.authority)
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"} {
		env = append(env, name+"="+w.trap.URL, strings.ToLower(name)+"="+w.trap.URL)
	}
	return env
}

// alertTest runs alert test as a process and returns what became of each channel, by its kind.
func (w *world) alertTest(t *testing.T, egress string) map[string]alert.Result {
	t.Helper()
	program := exec.CommandContext(t.Context(), os.Args[0], "alert", "test", "--json", "--config", w.configuration(t, egress))
	program.Env = w.environment()
	out, _ := program.Output()
	var results []alert.Result
	if err := json.Unmarshal(out, &results); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	byKind := map[string]alert.Result{}
	for _, r := range results {
		byKind[r.Channel[:strings.LastIndex(r.Channel, "-")]] = r
	}
	if len(byKind) != len(notify.Services()) {
		t.Errorf("%d of %d services were tried", len(byKind), len(notify.Services()))
	}
	return byKind
}

func (w *world) strays() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.stray)
}

// mute are the services whose clients lose the reason of a failure.
var mute = map[string]bool{"matrix": true, "zulip": true}

// Every service that is offered goes through the one transport: by the proxy of egress and never the environment's, to
// no forbidden address, and not on to where it is redirected.
func TestSecurityServicesObeyTheGuard(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	t.Run("proxy", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, nil)
		for kind, r := range w.alertTest(t, "{proxy: '"+w.proxy.URL+"'}") {
			if !r.OK {
				t.Errorf("%s: %s", kind, r.Error)
			}
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		for host := range serviceURLs {
			if len(w.bodies[host]) == 0 {
				t.Errorf("%s was not reached through egress.proxy", host)
			}
		}
		if len(w.mail.all()) != 1 || len(w.stray) != 0 {
			t.Errorf("%d mails; the environment's proxy was sent %q", len(w.mail.all()), w.stray)
		}
	})
	t.Run("redirect", func(t *testing.T) {
		t.Parallel()
		trap := newChat(t, respond(200, "{}"))
		w := newWorld(t, func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Location", trap.URL+r.URL.Path)
			rw.WriteHeader(http.StatusTemporaryRedirect)
		})
		for kind, r := range w.alertTest(t, "{proxy: '"+w.proxy.URL+"'}") {
			if kind != "smtp" && (r.OK || !mute[kind] && !strings.Contains(r.Error, "redirects are never followed")) {
				t.Errorf("%s: %+v", kind, r)
			}
		}
		if stray := append(w.strays(), trap.bodies...); len(stray) != 0 {
			t.Errorf("redirects were followed: %q", stray)
		}
	})
	t.Run("refusal", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, func(rw http.ResponseWriter, r *http.Request) {
			rw.WriteHeader(http.StatusForbidden)
			_, _ = io.WriteString(rw, "<html>")
		})
		for kind, r := range w.alertTest(t, "{proxy: '"+w.proxy.URL+"'}") {
			if kind != "smtp" && r.OK {
				t.Errorf("%s took an alert that was refused", kind)
			}
		}
	})
	t.Run("address", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, nil)
		// The name of this host, and so of the proxy before every service, leads to an address that may not be dialled.
		proxy := strings.Replace(w.proxy.URL, "127.0.0.1", "localhost", 1)
		for kind, r := range w.alertTest(t, "{proxy: '"+proxy+"', allow_private: []}") {
			if r.OK || !mute[kind] && !strings.Contains(r.Error, "egress.allow_private") {
				t.Errorf("%s: %+v", kind, r)
			}
		}
		if stray := w.strays(); len(stray)+len(w.bodies)+len(w.mail.all()) != 0 {
			t.Errorf("%q, %v, %q", stray, w.bodies, w.mail.all())
		}
	})
	t.Run("literal", func(t *testing.T) {
		t.Parallel()
		reached := newChat(t, respond(200, `{"id": 1}`))
		_, port, _ := strings.Cut(strings.TrimPrefix(reached.URL, "http://"), ":")
		for _, url := range []string{
			"gotify://0.0.0.0:" + port + "/" + gotifyToken + "?disabletls=yes", "mattermost://bot@0.0.0.0:" + port + "/token?disabletls=yes",
			"ntfy://0.0.0.0:" + port + "/topic?scheme=http", "bark://:key@0.0.0.0:" + port + "/?scheme=http",
			"smtp://0.0.0.0:" + port + "/?from=a@example.com&to=b@example.com", "matrix://:token@169.254.169.254:" + port + "/?disabletls=yes",
		} {
			file := writeFile(t, filepath.Join(t.TempDir(), usualFile), "alerts: {channels: [{service: '"+url+"'}]}\n")
			if r := command(nil, "alert", "test", "--config", file); r.code != cli.ExitFailed || !strings.Contains(r.stdout, "prohibited") {
				t.Errorf("%s: %+v", url, r)
			}
		}
		moved := newChat(t, func(rw http.ResponseWriter, r *http.Request) {
			http.Redirect(rw, r, reached.URL, http.StatusTemporaryRedirect)
		})
		file := writeFile(t, filepath.Join(t.TempDir(), usualFile), "alerts: {channels: [{service: '"+string(gotify(moved.Server))+"'}]}\n")
		if r := command(nil, "alert", "test", "--config", file); r.code != cli.ExitFailed || !strings.Contains(r.stdout, "redirects are never followed") {
			t.Errorf("%+v", r)
		}
		if got := reached.all(); got != "" || moved.all() == "" {
			t.Errorf("0.0.0.0, or who was redirected to, was sent %s", got)
		}
	})
}

// A mailServer takes mails over STARTTLS, from who has a password.
type mailServer struct {
	listener net.Listener
	tls      *tls.Config

	mu    sync.Mutex
	mails []string
}

func newMailServer(t *testing.T) *mailServer {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &mailServer{listener: listener}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { m.serve(conn) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		serving.Wait()
	})
	return m
}

func (m *mailServer) url() string {
	_, port, _ := net.SplitHostPort(m.listener.Addr().String())
	return "smtp://user:p%40ss@localhost:" + port + "/?from=relay@example.com&fromname=Relay&to=a@example.com,b@example.com"
}

func (m *mailServer) all() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.mails)
}

// serve speaks as much of RFC 5321 as a client needs.
func (m *mailServer) serve(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	in := bufio.NewReader(conn)
	say := func(line string) { _, _ = io.WriteString(conn, line+"\r\n") }
	say("220 mail.test ESMTP")
	var envelope strings.Builder
	secure, known := false, false
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		switch verb := strings.ToUpper(strings.TrimSpace(line)); {
		case strings.HasPrefix(verb, "EHLO") && secure:
			say("250-mail.test\r\n250 AUTH PLAIN")
		case strings.HasPrefix(verb, "EHLO"):
			say("250-mail.test\r\n250 STARTTLS")
		case verb == "STARTTLS":
			say("220 go on")
			conn, secure = tls.Server(conn, m.tls), true
			in = bufio.NewReader(conn)
		case strings.HasPrefix(verb, "AUTH PLAIN"):
			known = secure && strings.HasSuffix(strings.TrimSpace(line), "AHVzZXIAcEBzcw==") // user, p@ss
			say("235 welcome")
		case !known:
			say("530 authenticate over TLS first")
		case strings.HasPrefix(verb, "MAIL"), strings.HasPrefix(verb, "RCPT"):
			envelope.WriteString(line)
			say("250 fine")
		case verb == "DATA":
			say("354 go on")
			for {
				line, err := in.ReadString('\n')
				if err != nil {
					return
				}
				if line == ".\r\n" {
					break
				}
				envelope.WriteString(line)
			}
			m.mu.Lock()
			m.mails = append(m.mails, envelope.String())
			m.mu.Unlock()
			say("250 taken")
		case verb == "QUIT":
			say("221 bye")
			return
		}
	}
}

// A mail has the headers that it should and no other, whatever the alert holds.
func parseMail(t *testing.T, raw string) (subject, body string) {
	t.Helper()
	_, message, _ := strings.Cut(raw, "RCPT TO:<b@example.com>\r\n")
	parsed, err := mail.ReadMessage(strings.NewReader(message))
	if err != nil {
		t.Fatalf("%v: %s", err, raw)
	}
	names := slices.Sorted(maps.Keys(parsed.Header))
	if want := []string{"Auto-Submitted", "Content-Transfer-Encoding", "Content-Type", "Date", "From", "Message-Id", "Mime-Version", "Subject", "To"}; !slices.Equal(names, want) {
		t.Errorf("headers %q", names)
	}
	text, err := io.ReadAll(quotedprintable.NewReader(parsed.Body))
	if err != nil {
		t.Error(err)
	}
	return parsed.Header.Get("Subject"), string(text)
}
