package notify

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"mime"
	"mime/quotedprintable"
	"net"
	"net/mail"
	"net/smtp"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// A mailer sends one mail of plain text.
type mailer struct {
	*request
	from, fromName, clientHost string
	to                         []string
	auth, encryption           string
	startTLS, requireStartTLS  bool
}

func sendMail(r *request) {
	r.option("subject", "timeout") // an alert has its own
	m := mailer{
		request: r, fromName: plain.Line(r.option("fromname")), clientHost: cmp.Or(r.option("clienthost"), "localhost"),
		// A query makes a blank of a plus. Addresses have pluses and no blanks.
		from:       strings.ReplaceAll(r.option("from", "fromaddress"), " ", "+"),
		to:         split(strings.ReplaceAll(r.option("to", "toaddresses"), " ", "+")),
		auth:       r.choice("auth", "unknown", "none", "plain", "crammd5", "oauth2"),
		encryption: r.choice("encryption", "auto", "none", "explicittls", "implicittls"),
		startTLS:   r.isSet(true, "usestarttls", "starttls"), requireStartTLS: r.isSet(false, "requirestarttls"),
	}
	r.need(r.Hostname(), m.from, strings.Join(m.to, ""))
	switch {
	case r.isSet(false, "skiptlsverify"):
		r.problem = "has skiptlsverify; a mail server's certificate is always verified, against the system's authorities"
	case r.isSet(false, "usehtml"):
		r.problem = "has usehtml; alerts are sent as plain text"
	case m.auth == "oauth2":
		r.problem = "has auth=OAuth2, which is not supported; write Plain, CRAMMD5 or None"
	}
	for _, address := range append(m.to, m.from) {
		if parsed, err := mail.ParseAddress(address); err != nil || parsed.Address != address {
			r.problem = cmp.Or(r.problem, "has a from or to that is not a mail address such as ops@example.com")
		}
	}
	if r.problem == "" && r.transport != nil {
		if err := m.send(); err != nil {
			r.err = fmt.Errorf("send alert: %s", plain.Clip(r.mask().Hide(err.Error(), false)))
		}
	}
}

// send connects to the mail server. A password is sent only over TLS, or to this host.
func (m *mailer) send() error {
	host, port := m.Hostname(), cmp.Or(m.Port(), "25")
	dialled, err := m.transport.DialContext(m.ctx, "tcp", net.JoinHostPort(host, port))
	if err != nil {
		return err
	}
	defer context.AfterFunc(m.ctx, func() { _ = dialled.Close() })() // net/smtp takes no context
	conn, secure := dialled, &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12}
	implicit := m.encryption == "implicittls" || m.encryption == "auto" && port == "465"
	if implicit {
		conn = tls.Client(conn, secure)
	}
	client, err := smtp.NewClient(conn, host)
	if err != nil {
		_ = conn.Close()
		return err
	}
	defer func() { _ = client.Close() }()
	if m.clientHost != "auto" {
		if err := client.Hello(m.clientHost); err != nil {
			return err
		}
	}
	if offered, _ := client.Extension("STARTTLS"); offered && !implicit && m.startTLS && m.encryption != "none" {
		err = client.StartTLS(secure)
	} else if !implicit && (m.requireStartTLS || m.encryption == "explicittls") {
		err = errors.New("the mail server offers no STARTTLS, which the channel's url requires")
	}
	if err != nil {
		return err
	}
	name, password := m.User.Username(), m.password()
	switch {
	case m.auth == "plain", m.auth == "unknown" && name != "":
		err = client.Auth(smtp.PlainAuth("", name, password, host))
	case m.auth == "crammd5":
		err = client.Auth(smtp.CRAMMD5Auth(name, password))
	}
	if err != nil {
		return err
	}
	return m.write(client)
}

// write writes one mail over a connection that is ready for it.
func (m *mailer) write(client *smtp.Client) error {
	err := client.Mail(m.from)
	for _, to := range m.to {
		if err == nil {
			err = client.Rcpt(to)
		}
	}
	if err != nil {
		return err
	}
	w, err := client.Data()
	if err != nil {
		return err
	}
	_, domain, _ := strings.Cut(m.from, "@")
	_, _ = fmt.Fprint(w, // an error comes back from Close
		"From: ", &mail.Address{Name: m.fromName, Address: m.from}, "\r\nTo: ", strings.Join(m.to, ", "),
		"\r\nSubject: ", mime.QEncoding.Encode("utf-8", m.title), // printable: no line break that begins another header
		"\r\nDate: ", time.Now().UTC().Format(time.RFC1123Z), "\r\nMessage-ID: <", rand.Text(), "@", domain, ">",
		"\r\nAuto-Submitted: auto-generated", // no holiday answers it
		"\r\nMIME-Version: 1.0\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n")
	body := quotedprintable.NewWriter(w)
	_, _ = fmt.Fprint(body, m.text, "\r\n")
	if err := errors.Join(body.Close(), w.Close()); err != nil {
		return err
	}
	_ = client.Quit() // the mail is taken already
	return nil
}
