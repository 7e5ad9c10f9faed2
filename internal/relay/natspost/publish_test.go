package natspost_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/outbox-relay/outbox-relay/internal/relay/natspost"
	"github.com/outbox-relay/outbox-relay/internal/relay/policy"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	stored = `{"stream":"EVENTS","seq":1}`
	info   = "$JS.API.STREAM.INFO.EVENTS"
)

// configured is what a server says of a stream with these settings.
func configured(settings string) string {
	return `{"type":"io.nats.jetstream.api.v1.stream_info_response","config":{"name":"EVENTS",` + settings + `},"state":{}}`
}

func apiError(code, number int, text string) string {
	return fmt.Sprintf(`{"error":{"code":%d,"err_code":%d,"description":%q}}`, code, number, text)
}

func TestMessageIsAcknowledged(t *testing.T) {
	t.Parallel()
	s := imitate(t, map[string]string{"outbox.paid": stored})
	c := clientOf(t, s.address)
	expect(t, "first", attempt(t, c), policy.Result{Reason: policy.ReasonOK, Posted: true}, "")
	for _, part := range []string{"X-Tenant: finance\r\n", "Nats-Msg-Id: id-1\r\n", "Nats-Expected-Stream: EVENTS\r\n", `{"n":1}`} {
		if got := s.said(&s.messages); !strings.Contains(got, part) {
			t.Errorf("%q is missing in %q", part, got)
		}
	}
	testkit.Contains(t, "the server was told", s.said(&s.connects), `"name":"test audit"`)
	again := imitate(t, map[string]string{"outbox.paid": `{"stream":"EVENTS","seq":1,"duplicate":true}`})
	expect(t, "again", attempt(t, clientOf(t, again.address)), policy.Result{Reason: policy.ReasonOK, Posted: true, Duplicate: true}, "")
}

// What each answer means. Of a program that is not the stream, none must count as an
// acknowledgement: the event would be lost.
func TestAnswers(t *testing.T) {
	t.Parallel()
	const notStream = `is not the stream "EVENTS"`
	for name, c := range map[string]struct {
		answer, info string
		want         policy.Reason
		text         string
	}{
		"a program that answers":       {answer: "thanks", want: policy.ReasonMalformed, text: notStream},
		"another stream acknowledges":  {answer: `{"stream":"OTHER","seq":1}`, want: policy.ReasonMalformed, text: notStream},
		"acknowledged without a place": {answer: `{"stream":"EVENTS"}`, want: policy.ReasonMalformed, text: notStream},
		"full":                         {answer: apiError(503, 10077, "maximum messages exceeded"), want: policy.ReasonUnavailable, text: `maximum messages exceeded (10077): the stream "EVENTS" is full`},
		"no room":                      {answer: apiError(503, 10023, "insufficient resources"), want: policy.ReasonUnavailable, text: "raise its limits"},
		"too large":                    {answer: apiError(400, 10054, "message size exceeds maximum allowed"), want: policy.ReasonTooLarge, text: `raise max_msg_size of the stream "EVENTS"`},
		"another stream expected":      {answer: apiError(400, 10060, "expected stream does not match"), want: policy.ReasonNotFound, text: `another stream than "EVENTS" takes the subject "outbox.paid"`},
		"sealed":                       {answer: apiError(400, 10109, "invalid operation on sealed stream"), want: policy.ReasonNotFound, text: "takes nothing any more"},
		"not enabled":                  {answer: apiError(503, 10039, "jetstream not enabled for account"), want: policy.ReasonNotFound, text: "has no JetStream"},
		"not found":                    {answer: apiError(404, 10059, "stream not found"), want: policy.ReasonNotFound, text: "create it"},
		"not decided yet":              {answer: apiError(409, 10158, "message is in process"), want: policy.ReasonTransient},
		"an error of the server":       {answer: apiError(500, 19999, "new"), want: policy.ReasonServerError, text: "new (19999)"},
		"an unknown error":             {answer: apiError(400, 19999, "new"), want: policy.ReasonUnexpected, text: "new (19999)"},
		"no stream":                    {answer: "503", info: apiError(404, 10059, "stream not found"), want: policy.ReasonNotFound, text: `there is no stream "EVENTS"; create it with the subject "outbox.paid"`},
		"other subjects":               {answer: "503", info: configured(`"subjects":["a","b","c","d","e","f"]`), want: policy.ReasonNotFound, text: `takes "a", "b", "c", "d", "e" and 1 more, and not "outbox.paid"`},
		"a mirror":                     {answer: "503", info: configured(`"mirror":{"name":"M"}`), want: policy.ReasonNotFound, text: "takes no subjects, as a mirror"},
		"acknowledges nothing":         {answer: "503", info: configured(`"subjects":["outbox.>"],"no_ack":true`), want: policy.ReasonNotFound, text: "(no_ack)"},
		"is sealed":                    {answer: "503", info: configured(`"subjects":["outbox.>"],"sealed":true`), want: policy.ReasonNotFound, text: "is sealed"},
		"no leader":                    {answer: "503", info: configured(`"subjects":["outbox.>"]`), want: policy.ReasonUnavailable, text: `stream "EVENTS" has no leader`},
		"no JetStream":                 {answer: "503", info: "503", want: policy.ReasonNotFound, text: "has no JetStream"},
		"no right to ask":              {answer: "503", info: `-ERR 'Permissions Violation for Publish to "` + info + `"'`, want: policy.ReasonUnavailable, text: "does not exist, does not take this subject"},
		"no right to publish":          {answer: `-ERR 'Permissions Violation for Publish to "outbox.paid"'`, want: policy.ReasonUnauthorized, text: "allow the user to publish to that subject"},
		"hangs up":                     {answer: "close", want: policy.ReasonNetwork, text: "the server closed the connection before it acknowledged the message"},
		"the user expires":             {answer: "-ERR 'User Authentication Expired'", want: policy.ReasonUnauthorized, text: "the server refuses the relay's user"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client := clientOf(t, imitate(t, map[string]string{"outbox.paid": c.answer, info: c.info}).address)
			expect(t, name, attempt(t, client), policy.Result{Reason: c.want, Posted: true}, c.text)
		})
	}
}

// A stream whose acknowledgement is lost: the attempt has its own time, and counts. A stop cuts it
// off before.
func TestNoAcknowledgement(t *testing.T) {
	t.Parallel()
	c := clientOf(t, imitate(t, nil).address, timeout(200*time.Millisecond))
	expect(t, "late", attempt(t, c), policy.Result{Reason: policy.ReasonTimeout, Posted: true}, `no acknowledgement of stream "EVENTS" within the timeout; it may have stored the message`)
	ctx, cancel := context.WithCancel(t.Context())
	s := imitate(t, nil, func(s *imitation) {
		s.answer = func(subject string) string {
			if subject == "outbox.paid" {
				cancel()
			}
			return ""
		}
	})
	expect(t, "stopped", publish(ctx, clientOf(t, s.address), "1"), policy.Result{Reason: policy.ReasonShutdown, Posted: true}, "")
}

// Attempts that find no connection wait for one of them to make it, and share its error.
func TestAttemptsShareAConnection(t *testing.T) {
	t.Parallel()
	s := imitate(t, map[string]string{"outbox.paid": stored})
	refusing := imitate(t, map[string]string{"CONNECT": "-ERR 'Authorization Violation'"})
	c, unauthorized := clientOf(t, s.address), clientOf(t, refusing.address)
	var attempts sync.WaitGroup
	defer attempts.Wait()
	for range 20 {
		attempts.Go(func() {
			expect(t, "connected", attempt(t, c), policy.Result{Reason: policy.ReasonOK, Posted: true}, "")
			expect(t, "refused", attempt(t, unauthorized), policy.Result{Reason: policy.ReasonUnauthorized, Posted: true, Unreached: true}, "")
		})
	}
	attempts.Wait()
	testkit.Equal(t, "connections made", strings.Count(s.said(&s.connects), "CONNECT"), 1)
}

// Attempts share a connection that is being made, and not the time that another one has for it.
// Nothing is left of it when the client is closed; TestMain looks for it.
func TestAttemptsWaitNoLongerThanTheirTime(t *testing.T) {
	t.Parallel()
	dialled := make(chan struct{})
	report := sync.OnceFunc(func() { close(dialled) })
	c := clientOf(t, speaking(t, ""), timeout(10*time.Second), func(c *natspost.Config) {
		dial := c.Dial
		c.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			report()
			return dial(ctx, network, address)
		}
	})
	first, stop := context.WithCancel(t.Context())
	ended := make(chan policy.Result, 1)
	var attempts sync.WaitGroup
	defer attempts.Wait()
	attempts.Go(func() { ended <- publish(first, c, "1") })
	<-dialled
	second, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	expect(t, "second", publish(second, c, "2"), policy.Result{Reason: policy.ReasonTimeout, Posted: true, Unreached: true}, "does not answer as one of NATS in time")
	if len(ended) > 0 {
		t.Error("the second attempt has waited for the first one")
	}
	stop()
	expect(t, "first", <-ended, policy.Result{Reason: policy.ReasonShutdown, Posted: true, Unreached: true}, "")
}

// Each of many attempts reports a silent server as such, whichever of them asked it first.
func TestSilentServerIsReportedAsSuch(t *testing.T) {
	t.Parallel()
	c := clientOf(t, speaking(t, ""))
	var attempts sync.WaitGroup
	defer attempts.Wait()
	for i := range 200 {
		attempts.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*2*time.Millisecond)
			defer cancel()
			expect(t, "attempt", publish(ctx, c, "1"), policy.Result{Reason: policy.ReasonTimeout, Posted: true, Unreached: true}, "does not answer as one of NATS in time")
		})
	}
}

// The log of an endpoint is set after its client is made.
func TestConnectionsAreLogged(t *testing.T) {
	t.Parallel()
	var log zerolog.Logger
	s := imitate(t, map[string]string{"outbox.paid": "-ERR 'User Authentication Expired'"})
	c := clientOf(t, s.address, func(c *natspost.Config) { c.Log = &log })
	var lines relaytest.Buffer
	log = zerolog.New(&lines)
	attempt(t, c)
	relaytest.Eventually(t, "a line about the connection", func() bool {
		return strings.Contains(lines.String(), `"destination":"audit","error":"nats: authentication expired"`)
	})
}

// speaking starts a program that says a text to each client, and then nothing.
func speaking(t *testing.T, text string) (address string) {
	t.Helper()
	s := relaytest.NewRawServer(t, func(_ *relaytest.RawServer, conn net.Conn) {
		_, _ = conn.Write([]byte(text))
		for buffer := make([]byte, 512); ; {
			if _, err := conn.Read(buffer); err != nil {
				return
			}
		}
	})
	return strings.TrimSuffix(strings.TrimPrefix(s.URL, "http://"), "/")
}

// A silent server of a cluster leaves time for the others, whichever is asked first.
func TestSilentServerLeavesTime(t *testing.T) {
	t.Parallel()
	s, silent := imitate(t, map[string]string{"outbox.paid": stored}), speaking(t, "")
	var attempts sync.WaitGroup
	defer attempts.Wait()
	for range 4 {
		c := clientOf(t, silent, timeout(2*time.Second), func(c *natspost.Config) { c.Servers = append(c.Servers, s.address) })
		attempts.Go(func() { expect(t, "attempt", attempt(t, c), policy.Result{Reason: policy.ReasonOK, Posted: true}, "") })
	}
}

func TestErrorsOfAConnection(t *testing.T) {
	t.Parallel()
	refusing := func(text string) string { return imitate(t, map[string]string{"CONNECT": text}).address }
	for name, c := range map[string]struct {
		address string
		change  func(*natspost.Config)
		want    policy.Reason
		text    string
	}{
		"nothing listens":  {address: "127.0.0.1:1", want: policy.ReasonConnect, text: "connection refused"},
		"no such name":     {address: "nowhere.invalid:4222", want: policy.ReasonDNS, text: "nowhere.invalid"},
		"a silent peer":    {address: speaking(t, ""), change: timeout(300 * time.Millisecond), want: policy.ReasonTimeout, text: "does not answer as one of NATS in time"},
		"a server of mail": {address: speaking(t, "220 mail.example.com ESMTP\r\n"), want: policy.ReasonMalformed, text: "is not a server of NATS"},
		"refuses the user": {address: refusing("-ERR 'Authorization Violation'"), want: policy.ReasonUnauthorized, text: "the server refuses the relay's user"},
		"has too many":     {address: refusing("-ERR 'maximum connections exceeded'"), want: policy.ReasonConnect},
		"no TLS":           {address: refusing(""), change: func(c *natspost.Config) { c.Secure = true }, want: policy.ReasonTLS, text: "the server offers no TLS, and the url asks for it"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			changes := []func(*natspost.Config){func(*natspost.Config) {}}
			if c.change != nil {
				changes[0] = c.change
			}
			expect(t, name, attempt(t, clientOf(t, c.address, changes...)), policy.Result{Reason: c.want, Posted: true, Unreached: true}, c.text)
		})
	}
}

func TestSecuritySeedIsNotRepeated(t *testing.T) {
	t.Parallel()
	s := imitate(t, nil)
	v := attempt(t, clientOf(t, s.address, func(c *natspost.Config) { c.Seed = func() string { return "hunter2" } }))
	if v.Reason == policy.ReasonOK || !strings.Contains(v.Message, "the file of nats.nkey_file holds no seed") || strings.Contains(v.Message, "hunter2") {
		t.Errorf("%+v", v)
	}
}

func TestSecurityTypesReachNoSubjectOfTheServer(t *testing.T) {
	t.Parallel()
	c := clientOf(t, "", func(c *natspost.Config) { c.Settings.Subject = "{type}" })
	for _, eventType := range []string{"$JS.API.STREAM.PURGE.EVENTS", "_INBOX.x", "outbox.*", "outbox.>", "a..b", ".a", "a b", "a\r\nPUB x 1\r\nx"} {
		if subject, err := c.Subject(eventType, "o"); err == nil {
			t.Errorf("%q: published to %q", eventType, subject)
		}
	}
	if subject, err := c.Subject("paid", "o"); err != nil || subject != "paid" {
		t.Errorf("%q, %v", subject, err)
	}
}
