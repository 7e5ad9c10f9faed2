package config

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
)

// sampleFile is the annotated configuration that config init writes. A test holds it complete.
//
//go:embed sample.yaml
var sampleFile []byte

// minimalFile is what config init --minimal writes. It is valid as it is.
//
//go:embed minimal.yaml
var minimalFile []byte

// Command is the command config.
type Command struct {
	Init  initCommand  `cmd:"" help:"Write an annotated configuration file."`
	Check checkCommand `cmd:"" help:"Find every mistake; exit 3 if there is one."`
	Show  showCommand  `cmd:"" help:"Print what is in effect and where each value comes from. Secrets are masked."`
}

type initCommand struct {
	File    string `arg:"" optional:"" default:"outbox-relay.yaml" help:"The file to write; - writes to standard output."`
	Minimal bool   `help:"Only what a relay needs: a database, a destination and a route, from the same variables as without a file."`
}

func (cmd initCommand) Run(inv *cli.Invocation) error {
	content, next := sampleFile, "Adapt destinations and routes, remove what you leave as it is, then"
	if cmd.Minimal {
		content, next = minimalFile, "Adapt it, then"
	}
	if cmd.File == "-" {
		_, err := inv.Stdout.Write(content)
		return err
	}
	file, err := os.OpenFile(cmd.File, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s is there already; name another file, or remove it first", cmd.File)
	}
	if err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	_, err = file.Write(content)
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	_, err = fmt.Fprintf(inv.Stdout, "Wrote %s. %s: outbox-relay config check -c %s\n",
		output.Printable(cmd.File), next, plain.ShellWord(output.Printable(cmd.File)))
	return err
}

type checkCommand struct {
	SettingFlags
	Strict  bool `help:"Warnings, and destinations whose requests are not signed, are mistakes too."`
	Connect bool `help:"Also connect to each destination: is it reached, does its stream or topic exist, may the relay write to it? Exit 6 if not. Nothing is sent."`
}

func (cmd checkCommand) Run(inv *cli.Invocation) error {
	c, err := readAll(inv)
	if err != nil {
		return err
	}
	what := c.File
	if what == "" {
		what = "the configuration"
	}
	fmt.Fprintf(inv.Stdout, "%s is valid; it delivers to %s\n", what, plain.Some(c.Children("destinations"), 20))
	if n := len(c.Outboxes); n > 0 {
		fmt.Fprintf(inv.Stdout, "It serves %s\n", plain.Plural(n, "database", "databases"))
	}
	if names := c.Unsigned(); len(names) > 0 {
		fmt.Fprintf(inv.Stdout, "Not signed, since they have no signing_secrets: requests to %s\n", plain.Some(names, 20))
	}
	warned := 0
	if cmd.Connect {
		if warned, err = c.connect(inv); err != nil {
			return err
		}
	}
	if n := len(c.Warnings) + len(c.Unsigned()) + warned; cmd.Strict && n > 0 {
		return cli.ExitError{Code: cli.ExitConfig, Err: fmt.Errorf("%s above; without --strict they are no mistakes", plain.Plural(n, "warning", "warnings"))}
	}
	return nil
}

// reachTimeout bounds how long destinations have to answer.
const reachTimeout = 10 * time.Second

// connect reaches each destination, and prints what is wrong with it. It returns how many warnings
// there were.
func (c *Config) connect(inv *cli.Invocation) (warned int, err error) {
	ctx, cancel := context.WithTimeout(inv.Ctx, reachTimeout)
	defer cancel()
	failed := 0
	for _, reached := range post.ReachAll(ctx, c.Relay.Destinations, c.Relay.Egress) {
		switch {
		case reached.Err != nil:
			fmt.Fprintf(inv.Stderr, "destinations.%s: %s\n", reached.Destination, plain.Clip(reached.Err.Error()))
			failed++
		case len(reached.Warnings) == 0:
			fmt.Fprintf(inv.Stdout, "%s is reached\n", reached.Destination)
		}
		for _, warning := range reached.Warnings {
			fmt.Fprintf(inv.Stderr, "warning: destinations.%s: %s\n", reached.Destination, plain.Clip(warning))
			warned++
		}
	}
	if failed > 0 {
		return warned, cli.Foundf("%s cannot be used from here; a relay would let their events wait", plain.Plural(failed, "destination", "destinations"))
	}
	return warned, nil
}

type showCommand struct{ SettingFlags }

func (showCommand) Run(inv *cli.Invocation) error {
	c, err := readAll(inv)
	if err != nil {
		return err
	}
	text, err := c.Show()
	if err != nil {
		return err
	}
	_, err = inv.Stdout.Write(text)
	return err
}
