package reconcile

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/reconcile"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
	"github.com/outbox-relay/outbox-relay/relay"
)

// A receiver answers questions.
type receiver struct {
	ask   func(ctx context.Context, q reconcile.Request) (reconcile.Answer, error)
	close func()
}

func (cmd Command) open(inv *cli.Invocation, c *config.Config, destinations []relay.Destination) (receiver, error) {
	if cmd.URL != "" {
		return overHTTP(cmd.URL, c, destinations)
	}
	return cmd.overDatabase(inv)
}

// overDatabase asks the receiver's database.
func (cmd Command) overDatabase(inv *cli.Invocation) (receiver, error) {
	raw := inv.Getenv(receiverURL)
	if raw == "" {
		return receiver{}, cli.ExitError{Code: cli.ExitConfig, Err: errors.New(receiverURL + " is not set; --receiver reads that database")}
	}
	cfg, problem := config.ParseDatabaseURL(raw)
	if problem != "" {
		return receiver{}, cli.ExitError{Code: cli.ExitConfig, Err: fmt.Errorf("%s %s", receiverURL, problem)}
	}
	cfg.MaxConns, cfg.MinConns, cfg.MinIdleConns = 1, 0, 0
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = connectTimeout
	}
	pool, err := pgxpool.NewWithConfig(inv.Ctx, cfg)
	if err != nil {
		return receiver{}, fmt.Errorf("open the receiver's database: %w", err)
	}
	inbox := inboxops.New(pool)
	if err := cmd.check(inv.Ctx, inbox); err != nil {
		pool.Close()
		return receiver{}, fmt.Errorf("the receiver's database: %w", lackingRight(err, cfg.ConnConfig.User))
	}
	asked := inbox.Reconciled(inboxops.Sender{Receiver: cmd.Receiver, Source: cmd.Source}, cmd.Effects)
	return receiver{close: pool.Close, ask: func(ctx context.Context, q reconcile.Request) (reconcile.Answer, error) {
		a, err := asked.Answer(ctx, q)
		return a, missingTable(ctx, inbox, lackingRight(err, cfg.ConnConfig.User))
	}}, nil
}

// missingTable adds to the error of a query whose table is not found which table may be meant.
func missingTable(ctx context.Context, inbox *inboxops.Ops, err error) error {
	refused, isRefused := errors.AsType[*pgconn.PgError](err)
	if !isRefused || refused.Code != pg.UndefinedTable {
		return err
	}
	_, missing, _ := strings.Cut(refused.Message, `"`)
	missing, _, _ = strings.Cut(missing, `"`)
	tables, asked := inbox.Tables(ctx)
	if asked != nil {
		return err
	}
	near := settings.Nearest(missing[strings.LastIndex(missing, ".")+1:], slices.Sorted(maps.Keys(tables)))
	if near == "" {
		return fmt.Errorf("%w; no table of this database has a name like it: correct --effects, or RECEIVER_DATABASE_URL", err)
	}
	return fmt.Errorf("%w; did you mean %s? Write it so in --effects, with its schema", err, tables[near])
}

// check refuses a receiver that the database does not know: nothing would ever have arrived.
func (cmd Command) check(ctx context.Context, inbox *inboxops.Ops) error {
	if err := inbox.CheckSchema(ctx); err != nil {
		return err
	}
	all, err := inbox.Senders(ctx)
	if err != nil || len(all) == 0 || slices.Contains(all, inboxops.Sender{Receiver: cmd.Receiver, Source: cmd.Source}) {
		return err
	}
	var known []string
	for _, s := range all[:min(len(all), 20)] {
		known = append(known, fmt.Sprintf("--receiver %s --source %s", plain.ShellWord(s.Receiver), plain.ShellWord(s.Source)))
	}
	return cli.Usagef("receiver %s has nothing from source %s; there are: %s", settings.Quote(cmd.Receiver), settings.Quote(cmd.Source), strings.Join(known, ", "))
}

func lackingRight(err error, user string) error {
	if inboxops.LacksRight(err) {
		return fmt.Errorf("%w; this login needs a role of this version: run outbox-relay migrate roles at that database, and GRANT inbox_support TO %s", err, user)
	}
	return err
}

const (
	connectTimeout = 10 * time.Second
	// answerTimeout bounds one answer: a receiver may count effects for minutes.
	answerTimeout = 6 * time.Minute
	// maxAnswer is far above the largest answer, in bytes.
	maxAnswer = 8 << 20
)

// A handler asks that of consumer.Reconcile, or of a receiver in another language.
type handler struct {
	url         string
	client      *http.Client
	destination relay.Destination
	secrets     []webhook.Secret
}

func overHTTP(raw string, c *config.Config, destinations []relay.Destination) (receiver, error) {
	u, err := url.Parse(raw)
	d := destinations[0]
	switch {
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || u.User != nil:
		return receiver{}, cli.Usagef("--url: write one such as https://logistics.internal/webhooks/finance/reconcile, without a password")
	case raw == d.URL:
		return receiver{}, cli.Usagef("--url: this is where %s takes events; name the URL at which it answers reconcile", d.Name)
	}
	h := &handler{url: raw, destination: d}
	for _, d := range destinations {
		for _, secret := range d.SigningSecrets {
			h.secrets = append(h.secrets, secret.For(webhook.ReconcilePurpose))
		}
	}
	if len(h.secrets) == 0 {
		return receiver{}, cli.ExitError{Code: cli.ExitConfig, Err: fmt.Errorf("destinations.%s.signing_secrets is not set, and questions are signed; set it here and in the receiver's Config.Secrets", d.Name)}
	}
	transport, err := post.Beside(d, c.Relay.Egress, u)
	if err != nil {
		return receiver{}, err
	}
	h.client = &http.Client{Transport: transport, Timeout: answerTimeout, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return receiver{ask: h.ask, close: transport.CloseIdleConnections}, nil
}

func (h *handler) ask(ctx context.Context, q reconcile.Request) (a reconcile.Answer, err error) {
	body, err := q.Encode()
	if err != nil {
		return a, err
	}
	status, text, err := h.post(ctx, body)
	switch {
	case ctx.Err() != nil:
		return a, context.Cause(ctx)
	case err != nil:
		return a, fmt.Errorf("%s: %s", h.url, explained(err)) // not wrapped: it is no trouble with a database
	case status != http.StatusOK:
		return a, refusal(h.url, status, text)
	}
	if err := json.Unmarshal(text, &a); err != nil || a.Receiver == "" {
		return a, fmt.Errorf("%s answered 200 without an answer: does the receiver answer reconcile there?", h.url)
	}
	return a, nil
}

// post sends a question under its own key.
func (h *handler) post(ctx context.Context, body []byte) (status int, text []byte, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, h.url, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	for name, value := range h.destination.Headers {
		r.Header.Set(webhook.SentName(name), value)
	}
	if authorization := h.destination.Wire.Authorization; authorization != nil {
		r.Header.Set("Authorization", authorization())
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set(webhook.IdempotencyKey, "reconcile-"+rand.Text())
	r.Header.Set(webhook.Reconcile, h.destination.Name)
	webhook.Sign(r.Header, body, time.Now(), h.secrets...)
	answer, err := h.client.Do(r)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode == http.StatusSwitchingProtocols { // its body has neither an end nor a limit of time
		return answer.StatusCode, nil, nil
	}
	text, err = io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	return answer.StatusCode, text, err
}

// explained leaves out the URL, which the error repeats.
func explained(err error) string {
	if failed, ok := errors.AsType[*url.Error](err); ok {
		if failed.Timeout() {
			return fmt.Sprintf("no answer within %v", answerTimeout)
		}
		err = failed.Err
	}
	return plain.Clip(err.Error())
}

// refusal says why a receiver did not answer.
func refusal(url string, status int, text []byte) error {
	var problem struct {
		Title  string `json:"title"`
		Detail string `json:"detail"`
	}
	detail := ""
	if json.Unmarshal(text, &problem) == nil && problem.Title != "" {
		detail = ": " + problem.Title + ": " + problem.Detail
	} else if status == http.StatusNotFound || status == http.StatusMethodNotAllowed {
		detail = ": does the receiver answer reconcile there?"
	}
	return fmt.Errorf("%s answered %d%s", url, status, plain.Clip(detail))
}
