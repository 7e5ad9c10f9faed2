package notify

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/quotedprintable"
	"net"
	"net/mail"
	netsmtp "net/smtp"
	"strconv"
	"strings"
	"time"

	"github.com/nicholas-fedor/shoutrrr/pkg/services/email/smtp"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/relay/alert"
)

// mailProblem says what of a mail channel is not offered; empty: nothing. The library spells and reads the URL; its own
// client dials wherever a name leads, so that it is not used.
func mailProblem(cfg *smtp.Config) string {
	cfg.FixEmailTags()
	switch {
	case cfg.SkipTLSVerify:
		return "has skiptlsverify; a mail server's certificate is always verified, against the system's authorities"
	case cfg.UseHTML:
		return "has usehtml; alerts are sent as plain text"
	case cfg.Auth == smtp.AuthOAuth2:
		return "has auth=OAuth2, which is not supported; write Plain, CRAMMD5 or None"
	}
	for _, address := range append([]string{cfg.FromAddress}, cfg.ToAddresses...) {
		if parsed, err := mail.ParseAddress(address); err != nil || parsed.Address != address {
			return "has a from or to that is not a mail address such as ops@example.com"
		}
	}
	return ""
}

// sendMail sends an alert to all recipients as one mail of plain text. A password is sent only over TLS, or to this host.
func sendMail(ctx context.Context, transport *alert.Transport, cfg *smtp.Config, alert alert.Alert) error {
	if problem := mailProblem(cfg); problem != "" {
		return errors.New("the channel's url " + problem)
	}
	conn, err := transport.DialContext(ctx, "tcp", net.JoinHostPort(cfg.Host, strconv.Itoa(int(cfg.Port))))
	if err != nil {
		return err
	}
	dialled := conn
	defer context.AfterFunc(ctx, func() { _ = dialled.Close() })() // net/smtp takes no context
	secure := &tls.Config{ServerName: cfg.Host, MinVersion: tls.VersionTLS12}
	implicit := cfg.Encryption == smtp.EncImplicitTLS || cfg.Encryption == smtp.EncAuto && cfg.Port == smtp.ImplicitTLSPort
	if implicit {
		conn = tls.Client(conn, secure)
	}
	client, err := netsmtp.NewClient(conn, cfg.Host)
	if err != nil {
		_ = conn.Close()
		return err
	}
	defer func() { _ = client.Close() }()
	if cfg.ClientHost != "auto" {
		if err := client.Hello(cfg.ClientHost); err != nil {
			return err
		}
	}
	if offered, _ := client.Extension("STARTTLS"); offered && !implicit && cfg.UseStartTLS && cfg.Encryption != smtp.EncNone {
		if err := client.StartTLS(secure); err != nil {
			return err
		}
	} else if !implicit && (cfg.RequireStartTLS || cfg.Encryption == smtp.EncExplicitTLS) {
		return errors.New("the mail server offers no STARTTLS, which the channel's url requires")
	}
	switch cfg.Auth {
	case smtp.AuthPlain:
		err = client.Auth(netsmtp.PlainAuth("", cfg.Username, cfg.Password, cfg.Host))
	case smtp.AuthCRAMMD5:
		err = client.Auth(netsmtp.CRAMMD5Auth(cfg.Username, cfg.Password))
	}
	if err != nil {
		return err
	}
	return writeMail(client, cfg, alert)
}

// writeMail writes one mail over a connection that is ready for it.
func writeMail(client *netsmtp.Client, cfg *smtp.Config, alert alert.Alert) error {
	if err := client.Mail(cfg.FromAddress); err != nil {
		return err
	}
	for _, to := range cfg.ToAddresses {
		if err := client.Rcpt(to); err != nil {
			return err
		}
	}
	w, err := client.Data()
	if err != nil {
		return err
	}
	_, domain, _ := strings.Cut(cfg.FromAddress, "@")
	for _, header := range [][2]string{
		{"From", (&mail.Address{Name: plain.Line(cfg.FromName), Address: cfg.FromAddress}).String()},
		{"To", strings.Join(cfg.ToAddresses, ", ")},
		{"Subject", mime.QEncoding.Encode("utf-8", alert.Title())}, // printable: no line break that begins another header
		{"Date", time.Now().UTC().Format(time.RFC1123Z)},
		{"Message-ID", "<" + rand.Text() + "@" + domain + ">"},
		{"Auto-Submitted", "auto-generated"}, // no holiday answers it
		{"MIME-Version", "1.0"},
		{"Content-Type", "text/plain; charset=utf-8"},
		{"Content-Transfer-Encoding", "quoted-printable"},
	} {
		if _, err := fmt.Fprintf(w, "%s: %s\r\n", header[0], header[1]); err != nil {
			return err
		}
	}
	body := quotedprintable.NewWriter(w)
	if _, err := io.WriteString(w, "\r\n"); err != nil {
		return err
	}
	if _, err := io.WriteString(body, alert.Text()+"\r\n"); err != nil {
		return err
	}
	if err := errors.Join(body.Close(), w.Close()); err != nil {
		return err
	}
	_ = client.Quit() // the mail is taken already
	return nil
}
