// Package alerts is the command alerts: it tries the channels, acknowledges alerts and silences
// them.
package alerts

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/bulk"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// Command is the command alerts.
type Command struct {
	Test        testCommand        `cmd:"" help:"Send a test alert to every channel and show what came back."`
	Acknowledge acknowledgeCommand `cmd:"" help:"Say that an open alert is known: it is not repeated until it returns."`
	Silence     silenceCommand     `cmd:"" help:"Send nothing of some alerts for a while, as during maintenance."`
}

type acknowledgeCommand struct {
	config.DatabaseFlags
	cli.ActorFlag
	Rule    string `arg:"" help:"The rule, as status and the alert name it."`
	Subject string `arg:"" help:"What it is about: the destination, the relay or the database."`
}

func (acknowledgeCommand) Help() string {
	return `Its recovery is sent. The audit and status say who has acknowledged it.`
}

func (cmd acknowledgeCommand) Run(inv *cli.Invocation) error {
	err := ask(inv, "alerts acknowledge", cmd.Rule+" of "+cmd.Subject, func(ctx context.Context, outbox *ops.Outbox) error {
		return outbox.AcknowledgeAlert(ctx, cmd.Rule, cmd.Subject)
	})
	if err == nil {
		_, err = fmt.Fprintf(inv.Stdout, "%s of %s is acknowledged: it is not sent again until it returns.\n", plain.Line(cmd.Rule), plain.Line(cmd.Subject))
	}
	return err
}

// ask changes something of alerts, and leaves the line that says later who did.
func ask(inv *cli.Invocation, action, selection string, change func(context.Context, *ops.Outbox) error) error {
	c, err := config.Read(inv, "database")
	if err != nil {
		return err
	}
	if err := c.Ask(inv, change); err != nil {
		return err
	}
	bulk.Audit(inv, c, action, selection, 1, nil)
	return nil
}

type silenceCommand struct {
	config.DatabaseFlags
	cli.ActorFlag
	Rule    string        `placeholder:"RULE" help:"Only alerts of this rule."`
	Subject string        `placeholder:"NAME" help:"Only alerts about this destination, relay or database."`
	For     time.Duration `required:"" placeholder:"DURATION" help:"For how long, at most 720h; 0s ends a silence."`
	Reason  string        `placeholder:"TEXT" help:"Why, for the audit."`
}

func (silenceCommand) Help() string {
	return `Without --rule and --subject all alerts are silent. What lasts longer than the silence is sent when it ends, and recoveries of what was sent
before are sent within it. Status and the page show what is silenced.`
}

func (cmd silenceCommand) Run(inv *cli.Invocation) error {
	if cmd.For < 0 || cmd.For > ops.MaxSilence {
		return cli.Usagef("--for: %s is out of range; write up to 720h, or 0s to end a silence", cmd.For)
	}
	selection := fmt.Sprintf("--rule=%s --subject=%s --for=%s", cmd.Rule, cmd.Subject, plain.Span(cmd.For))
	err := ask(inv, "alerts silence", selection, func(ctx context.Context, outbox *ops.Outbox) error {
		return outbox.SilenceAlerts(ctx, cmd.Rule, cmd.Subject, cmd.For, cmd.Reason)
	})
	unknown, isUnknown := errors.AsType[ops.UnknownSubject](err)
	switch {
	case errors.Is(err, ops.ErrUnknownRule):
		return cli.Usagef("--rule: %v", err)
	case isUnknown:
		hint := cmp.Or(settings.DidYouMean(unknown.Name, unknown.Known), "; see: outbox-relay status")
		return cli.Usagef("--subject: %v%s", unknown, hint)
	case err != nil:
		return err
	case cmd.For == 0:
		_, err = fmt.Fprintln(inv.Stdout, "The silence has ended.")
	default:
		_, err = fmt.Fprintf(inv.Stdout, "Silent for %s.\n", plain.Span(cmd.For))
	}
	return err
}

type testCommand struct {
	config.FileFlag
	Channel string `placeholder:"NAME" help:"Only this channel, by the name shown, or all of a kind: slack, webhook, smtp …"`
	JSON    bool   `help:"Print JSON: an array of {channel, ok, error, duration_ms}. Fields are added, never renamed or removed."`
}

func (testCommand) Help() string {
	return `Needs no database. Exits 6 if any channel failed.`
}

// Result is what became of one test alert.
type Result struct {
	Channel    string `json:"channel"`
	OK         bool   `json:"ok"`
	Error      string `json:"error,omitempty"`
	DurationMS int64  `json:"duration_ms"`
}

func (cmd testCommand) Run(inv *cli.Invocation) error {
	c, err := config.Read(inv, "alerts", "egress")
	if err != nil {
		return err
	}
	var names []string
	var chosen []alert.Channel
	for _, channel := range c.Relay.Alerts.Channels {
		names = append(names, channel.Name())
		if name := channel.Name(); cmd.Channel == "" || name == cmd.Channel || name[:strings.LastIndex(name, "-")] == cmd.Channel {
			chosen = append(chosen, channel)
		}
	}
	switch {
	case len(names) == 0:
		return errors.New(`no channel is configured; add one to alerts.channels, such as {slack: "https://hooks.slack.com/…"}, or set OUTBOX_ALERTS_CHANNELS_SLACK`)
	case len(chosen) == 0:
		return cli.Usagef("--channel: there is no channel %q; there are %s", cmd.Channel, strings.Join(names, ", "))
	}
	results := testChannels(inv.Ctx, chosen)
	failed := 0
	for _, r := range results {
		if !r.OK {
			failed++
		}
	}
	err = output.Show(inv.Stdout, cmd.JSON, results, printChannels)
	if err == nil && failed > 0 {
		err = cli.Foundf("%d of %s did not take the alert", failed, plain.Plural(len(results), "channel", "channels"))
	}
	return err
}

// testTimeout bounds one message of alerts test.
const testTimeout = 15 * time.Second

// testChannels tells all channels at the same time.
func testChannels(ctx context.Context, channels []alert.Channel) []Result {
	results := make([]Result, len(channels))
	var telling sync.WaitGroup
	for i, channel := range channels {
		telling.Go(func() {
			sending, cancel := context.WithTimeout(ctx, testTimeout)
			defer cancel()
			began := time.Now()
			err := channel.Notify(sending, alert.NewTest(began))
			results[i] = Result{Channel: channel.Name(), OK: err == nil, DurationMS: time.Since(began).Milliseconds()}
			if err != nil {
				results[i].Error = cli.OneLine(err.Error())
			}
		})
	}
	telling.Wait()
	return results
}

func printChannels(w io.Writer, results []Result) error {
	return output.Table(w, "", "CHANNEL\tTOOK\tRESULT", results, func(r Result) []any {
		return []any{r.Channel, fmt.Sprintf("%dms", r.DurationMS), cmp.Or(r.Error, "ok")}
	})
}
