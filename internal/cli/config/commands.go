package config

import (
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
)

// sampleFile is the annotated configuration that config init writes. A test holds it complete.
//
//go:embed sample.yaml
var sampleFile []byte

// Command is the command config.
type Command struct {
	Init  initCommand  `cmd:"" help:"Write an annotated configuration file."`
	Check checkCommand `cmd:"" help:"Find every mistake; exit 3 if there is one."`
	Show  showCommand  `cmd:"" help:"Print what is in effect and where each value comes from. Secrets are masked."`
}

type initCommand struct {
	File string `arg:"" optional:"" default:"outbox-relay.yaml" help:"The file to write; - writes to standard output."`
}

func (cmd initCommand) Run(inv *cli.Invocation) error {
	if cmd.File == "-" {
		_, err := inv.Stdout.Write(sampleFile)
		return err
	}
	file, err := os.OpenFile(cmd.File, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s is there already; name another file, or remove it first", cmd.File)
	}
	if err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	_, err = file.Write(sampleFile)
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	_, err = fmt.Fprintf(inv.Stdout, "Wrote %s. Adapt destinations and routes, remove what you leave as it is, then: outbox-relay config check -c %s\n",
		output.Printable(cmd.File), plain.ShellWord(output.Printable(cmd.File)))
	return err
}

type checkCommand struct {
	SettingFlags
	Strict bool `help:"Warnings, and destinations whose requests are not signed, are mistakes too."`
}

func (cmd checkCommand) Run(inv *cli.Invocation) error {
	c, err := Read(inv)
	if err != nil {
		return err
	}
	what := c.File
	if what == "" {
		what = "the configuration"
	}
	fmt.Fprintf(inv.Stdout, "%s is valid; it delivers to %s\n", what, strings.Join(c.Children("destinations"), ", "))
	if names := c.Unsigned(); len(names) > 0 {
		fmt.Fprintf(inv.Stdout, "Not signed, since they have no signing_secrets: requests to %s\n", strings.Join(names, ", "))
	}
	if n := len(c.Warnings) + len(c.Unsigned()); cmd.Strict && n > 0 {
		return cli.ExitError{Code: cli.ExitConfig, Err: fmt.Errorf("%s above; without --strict they are no mistakes", plain.Plural(n, "warning", "warnings"))}
	}
	return nil
}

type showCommand struct{ SettingFlags }

func (showCommand) Run(inv *cli.Invocation) error {
	c, err := Read(inv)
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
