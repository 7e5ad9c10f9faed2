package events

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// Send is the command send.
type Send struct {
	config.DatabaseFlags
	cli.ActorFlag
	Type      string            `arg:"" help:"The event's type, such as invoice.created."`
	Payload   string            `default:"{}" placeholder:"JSON" help:"The payload; @FILE reads it from a file, - from standard input."`
	Key       string            `placeholder:"KEY" help:"The idempotency key. Default: send- and a random one."`
	Order     string            `name:"ordering-key" placeholder:"KEY" help:"The ordering key."`
	Reference string            `placeholder:"REFERENCE" help:"The related reference."`
	Header    map[string]string `placeholder:"NAME=VALUE" help:"A header that is sent with it; may be repeated."`
	JSON      bool              `help:"Print JSON: {idempotency_key}."`
}

func (Send) Help() string {
	return `Inserts one event, with the very INSERT that producers make: to try a route, a receiver or a new installation. It needs the
rights of a producer (outbox_producer) only. With those of a relay as well (outbox_relay) it is in the audit, too.

  outbox-relay send invoice.created --payload '{"invoice": "4711"}' --key invoice-4711-created`
}

// maxPayload bounds what is read of a payload, in bytes.
const maxPayload = 64 << 20

func (cmd Send) Run(inv *cli.Invocation) error {
	payload, err := cmd.payload(inv.Stdin)
	if err != nil {
		return err
	}
	if !json.Valid([]byte(payload)) {
		return cli.Usagef("--payload: is not JSON")
	}
	c, err := config.Read(inv, "database")
	if err != nil {
		return err
	}
	if cmd.Key == "" {
		cmd.Key = "send-" + rand.Text()
	}
	pool, err := c.Open(inv.Ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	err = ops.New(pool).As(inv.Actor()).Send(inv.Ctx, ops.NewEvent{
		Type: cmd.Type, Payload: payload, IdempotencyKey: cmd.Key, OrderingKey: cmd.Order, RelatedReference: cmd.Reference, Headers: cmd.Header,
	})
	if pg.HasCode(err, "42501") { // insufficient_privilege
		return fmt.Errorf("%w; run migrations/roles.sql and grant this login outbox_producer", err)
	} else if err != nil {
		return err
	}
	c.Audit(inv, "send").Str("type", cmd.Type).Str("idempotency_key", cmd.Key).Msg("audit")
	type sent struct {
		IdempotencyKey string `json:"idempotency_key"`
	}
	return output.Show(inv.Stdout, cmd.JSON, sent{cmd.Key}, func(w io.Writer, _ sent) error {
		end := "" // of the flags: without it a key that begins with a hyphen is read as one
		if strings.HasPrefix(cmd.Key, "-") {
			end = "-- "
		}
		_, err := fmt.Fprintf(w, "Inserted. What becomes of it: outbox-relay explain %s%s\n", end, plain.ShellWord(output.Printable(cmd.Key)))
		return err
	})
}

// payload returns the payload, wherever it is to be read from.
func (cmd Send) payload(stdin io.Reader) (string, error) {
	var from io.Reader
	switch name, isFile := strings.CutPrefix(cmd.Payload, "@"); {
	case cmd.Payload == "-":
		from = stdin
	case isFile:
		file, err := os.Open(name)
		if err != nil {
			return "", fmt.Errorf("read payload: %w", err)
		}
		defer func() { _ = file.Close() }()
		from = file
	default:
		return cmd.Payload, nil
	}
	content, err := io.ReadAll(io.LimitReader(from, maxPayload+1))
	switch {
	case err != nil:
		return "", fmt.Errorf("read payload: %w", err)
	case len(content) > maxPayload:
		return "", errors.New("read payload: it is larger than 64 MiB")
	}
	return string(content), nil
}
