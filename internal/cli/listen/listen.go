// Package listen is the command listen: a receiver that prints what it gets.
package listen

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// Command is the command listen.
type Command struct {
	Listen string        `default:"127.0.0.1:8080" placeholder:"HOST:PORT" help:"Where to listen. Default: 127.0.0.1:8080."`
	Secret string        `env:"OUTBOX_SIGNING_SECRET" placeholder:"whsec_…" help:"Verify signatures with it; several with commas. Better set OUTBOX_SIGNING_SECRET: others see flags in the list of processes."`
	Fail   int           `placeholder:"STATUS" help:"Answer every request with this status, such as 503."`
	Delay  time.Duration `placeholder:"2s" help:"Wait so long before each answer."`
}

func (Command) Help() string {
	return `Receives events and prints each, until it is interrupted: to look at what a relay sends, without your own receiver. With a secret it verifies
the signature as receivers do, and answers 401 to what is not signed with it. It keeps nothing, and does not deduplicate.

  OUTBOX_DESTINATION_URL=http://127.0.0.1:8080 outbox-relay run
  outbox-relay listen --fail 503          # what does the relay make of a receiver that is down?`
}

// Bounds of what listen takes.
const (
	maxBody   = 16 << 20
	tolerance = 5 * time.Minute
)

func (cmd Command) Run(inv *cli.Invocation) error {
	if cmd.Fail != 0 && (cmd.Fail < 300 || cmd.Fail > 599) {
		return cli.Usagef("--fail: %d is out of range; write a status from 300 to 599", cmd.Fail)
	}
	var secrets []webhook.Secret
	if secret := cmp.Or(cmd.Secret, inv.Getenv("OUTBOX_SIGNING_SECRET")); secret != "" {
		var err error
		if secrets, err = webhook.ParseSecrets(secret); err != nil {
			return cli.Usagef("--secret: %s", err)
		}
	}
	listener, err := new(net.ListenConfig).Listen(inv.Ctx, "tcp", cmd.Listen)
	if err != nil {
		return fmt.Errorf("%w; end what listens there, such as another outbox-relay listen, or choose another with --listen, such as 127.0.0.1:18080, and write the same into OUTBOX_DESTINATION_URL", err)
	}
	fmt.Fprintf(inv.Stderr, "listening on http://%s; signatures are %s\n", listener.Addr(), map[bool]string{true: "verified", false: "not verified: no secret is given"}[len(secrets) > 0])
	printer := &eventPrinter{cmd: cmd, secrets: secrets, w: inv.Stdout, ctx: inv.Ctx}
	server := &http.Server{Handler: printer, ReadTimeout: time.Minute, ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("listen: %w", err)
	case <-inv.Ctx.Done():
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(inv.Ctx), time.Second)
	defer cancel()
	_ = server.Shutdown(ctx)
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// An eventPrinter is a receiver that prints.
type eventPrinter struct {
	cmd     Command
	secrets []webhook.Secret
	ctx     context.Context //nolint:containedctx // that of the command

	mu sync.Mutex // one event is printed at a time
	w  io.Writer
}

func (p *eventPrinter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		http.Error(w, "the body cannot be read", http.StatusBadRequest)
		return
	}
	status, signature := http.StatusNoContent, "not verified"
	if len(p.secrets) > 0 {
		signature = "valid"
		if _, err := webhook.Verify(r.Header, body, time.Now(), tolerance, p.secrets...); err != nil {
			status, signature = http.StatusUnauthorized, "refused: "+err.Error()
		}
	}
	if p.cmd.Fail != 0 {
		status = p.cmd.Fail
	}
	if p.cmd.Delay > 0 {
		select {
		case <-time.After(p.cmd.Delay):
		case <-p.ctx.Done():
		case <-r.Context().Done():
		}
	}
	p.print(r, body, status, signature)
	w.WriteHeader(status)
}

func (p *eventPrinter) print(r *http.Request, body []byte, status int, signature string) {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s, signature %s, answered %d\n", r.Method, output.Printable(r.URL.Path), signature, status)
	names := make([]string, 0, len(r.Header))
	for name := range r.Header {
		if webhook.Covered(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(&b, "  %s: %s\n", name, output.Printable(r.Header.Get(name)))
	}
	fmt.Fprintf(&b, "  %s\n\n", output.Printable(string(body)))
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = io.WriteString(p.w, b.String())
}
