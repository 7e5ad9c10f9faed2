// Package alert is the command alert, which tries the alert channels.
package alert

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
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/relay/alert"
)

// Command is the command alert.
type Command struct {
	Test testCommand `cmd:"" help:"Send a test alert to every channel and show what came back."`
}

type testCommand struct {
	config.FileFlag
	Channel string `placeholder:"NAME" help:"Only this channel, by the name shown, or all of a kind: slack, webhook, smtp …"`
	JSON    bool   `help:"Print JSON: an array of {channel, ok, error, duration_ms}. Fields are added, never renamed or removed."`
}

func (testCommand) Help() string {
	return `Needs no database. Exits 1 if any channel failed, or if there is none.`
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
		return errors.New(`no channel is configured; add one to alerts.channels, such as {slack: "https://hooks.slack.com/…"}, or set OUTBOX_SLACK_WEBHOOK_URL`)
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
		err = fmt.Errorf("%d of %s did not take the alert", failed, plain.Plural(len(results), "channel", "channels"))
	}
	return err
}

// testTimeout bounds one message of alert test.
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
