package notifytest

import (
	"crypto/tls"
	"io"
	"maps"
	"mime/quotedprintable"
	"net"
	"net/mail"
	"net/textproto"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// A MailServer takes mails over STARTTLS from a user with a password.
type MailServer struct {
	listener net.Listener
	tls      *tls.Config

	mu    sync.Mutex
	mails []string
}

func newMailServer(t *testing.T, pair tls.Certificate) *MailServer {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &MailServer{listener: listener, tls: &tls.Config{Certificates: []tls.Certificate{pair}}}
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

// URL returns the channel of this server, to two recipients.
func (m *MailServer) URL() string {
	_, port, _ := net.SplitHostPort(m.listener.Addr().String())
	return "smtp://user:p%40ss@localhost:" + port + "/?from=relay@example.com&fromname=Relay&to=a@example.com,b@example.com"
}

// All returns the mails that were taken, with their envelopes.
func (m *MailServer) All() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.mails)
}

// serve speaks as much of RFC 5321 as a client needs.
func (m *MailServer) serve(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	talk := textproto.NewConn(conn)
	var envelope strings.Builder
	extension, known := "STARTTLS", false
	for answer := "220 mail.test ESMTP"; ; {
		if answer != "" {
			_ = talk.PrintfLine("%s", answer)
		}
		line, err := talk.ReadLine()
		if err != nil {
			return
		}
		verb, argument, _ := strings.Cut(line, " ")
		answer = "250 fine"
		switch {
		case verb == "EHLO":
			answer = "250-mail.test\r\n250 " + extension
		case verb == "STARTTLS":
			_ = talk.PrintfLine("220 continue")
			talk, extension, answer = textproto.NewConn(tls.Server(conn, m.tls)), "AUTH PLAIN", ""
		case verb == "AUTH":
			known, answer = extension == "AUTH PLAIN" && argument == "PLAIN AHVzZXIAcEBzcw==", "235 welcome" // user, p@ss
		case !known:
			answer = "530 authenticate over TLS first"
		case verb == "DATA":
			_ = talk.PrintfLine("354 continue")
			text, _ := talk.ReadDotBytes()
			m.mu.Lock()
			m.mails = append(m.mails, envelope.String()+string(text))
			m.mu.Unlock()
		default:
			envelope.WriteString(line + "\n")
		}
	}
}

// ParseMail returns the subject and the text of a mail that [MailServer.All] has returned. The test
// fails if the mail has other headers than a mail of an alert.
func ParseMail(t *testing.T, raw string) (subject, body string) {
	t.Helper()
	_, message, _ := strings.Cut(raw, "RCPT TO:<b@example.com>\n")
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
