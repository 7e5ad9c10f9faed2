package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"bash, zsh or fish."`
}

func (completionCmd) Help() string {
	return `Prints a script that completes commands, flags and their values; destinations and event types are those of the database:

  source <(outbox-relay completion bash)                    # in ~/.bashrc
  source <(outbox-relay completion zsh)                     # in ~/.zshrc, after compinit
  outbox-relay completion fish > ~/.config/fish/completions/outbox-relay.fish`
}

func (cmd completionCmd) Run(inv *cli.Invocation, kctx *kong.Context) error {
	var b strings.Builder
	root := kctx.Model.Node
	if cmd.Shell == "fish" {
		completeFish(&b, root, nil)
	} else {
		if cmd.Shell == "zsh" {
			b.WriteString("autoload -U +X bashcompinit && bashcompinit\n")
		}
		completeBash(&b, root)
	}
	_, err := io.WriteString(inv.Stdout, b.String())
	return err
}

// completeBash writes a function for bash. It goes through the words before the cursor to find
// which command they name.
func completeBash(b *strings.Builder, root *kong.Node) {
	var paths, words, values strings.Builder
	walkCommands(root, "", func(path string, node *kong.Node) {
		if path != "" {
			if paths.Len() > 0 {
				paths.WriteByte('|')
			}
			fmt.Fprintf(&paths, "%q", path)
		}
		static := strings.Join(append(childNames(node), flagNames(node)...), " ")
		for _, value := range node.Positional {
			static = strings.TrimSpace(static + " " + bashValues(value))
		}
		fmt.Fprintf(&words, "      %q) words=\"%s\" ;;\n", path, static)
		for _, flag := range node.Flags {
			if known := bashValues(flag.Value); known != "" {
				fmt.Fprintf(&values, "    \"%s --%s\") words=\"%s\" ;;\n", path, flag.Name, known)
			}
		}
	})
	fmt.Fprintf(b, `_outbox_relay() {
  local path="" words="" i cur="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
  [ "$cur" != "=" ] || cur=""
  [ "$before" != "=" ] || before="${COMP_WORDS[COMP_CWORD-2]}"
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$path ${COMP_WORDS[i]}" in
      %s) path="$path ${COMP_WORDS[i]}" ;;
    esac
  done
  case "$path $before" in
%s    *) case "$path" in
%s    esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _outbox_relay outbox-relay
`, paths.String(), values.String(), words.String())
}

// bashValues returns words that expand to what a flag or an argument can be, as far as it is known.
func bashValues(value *kong.Value) string {
	if what := namedIn(value); what != "" {
		return `$("${COMP_WORDS[0]}" complete ` + what + ` 2>/dev/null)`
	}
	return strings.ReplaceAll(value.Enum, ",", " ")
}

// namedIn returns which names of the database a flag or an argument takes; empty: none.
func namedIn(value *kong.Value) string {
	switch value.Name {
	case "destination", "type":
		return value.Name
	case "reason":
		if value.Tag.PlaceHolder == "REASON" { // another is a text
			return value.Name
		}
	case "event-type":
		return "type"
	}
	return ""
}

type completeCmd struct {
	config.DatabaseFlags
	What string `arg:"" enum:"destination,reason,type"`
}

// Run prints what completes a flag. No destination, reason or type is named ?, so that all that are
// known are offered.
func (cmd completeCmd) Run(inv *cli.Invocation) error {
	return config.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) error {
		unknown, err := outbox.UnknownNames(ctx, "?", "?", "?")
		for _, u := range unknown {
			if u.What == cmd.What {
				fmt.Fprintln(inv.Stdout, strings.Join(u.Known, "\n"))
			}
		}
		return err
	})
}

// walkCommands calls f for a command and for all below it, with the words that lead there, each
// behind a blank.
func walkCommands(node *kong.Node, path string, f func(path string, node *kong.Node)) {
	f(path, node)
	for _, child := range node.Children {
		if !child.Hidden {
			walkCommands(child, path+" "+child.Name, f)
		}
	}
}

func childNames(node *kong.Node) (names []string) {
	for _, child := range node.Children {
		if !child.Hidden {
			names = append(names, child.Name)
		}
	}
	return names
}

func flagNames(node *kong.Node) (names []string) {
	for _, flag := range node.Flags {
		if !flag.Hidden {
			names = append(names, "--"+flag.Name)
		}
	}
	return append(names, "--help")
}

// completeFish writes one line for each command and flag.
func completeFish(b *strings.Builder, node *kong.Node, before []string) {
	condition := "__fish_use_subcommand"
	if len(before) > 0 {
		condition = "__fish_seen_subcommand_from " + before[len(before)-1]
	}
	for _, child := range node.Children {
		if child.Hidden {
			continue
		}
		fmt.Fprintf(b, "complete -c outbox-relay -f -n '%s' -a %s -d '%s'\n", condition, child.Name, strings.ReplaceAll(child.Help, "'", `\'`))
		completeFish(b, child, append(before, child.Name))
	}
	if len(before) == 0 {
		return
	}
	for _, flag := range node.Flags {
		if !flag.Hidden && flag.Name != "help" {
			fmt.Fprintf(b, "complete -c outbox-relay -n '%s' -l %s -d '%s'%s\n", condition, flag.Name, strings.ReplaceAll(flag.Help, "'", `\'`), fishValues(flag.Value))
		}
	}
	for _, value := range node.Positional {
		if known := fishValues(value); known != "" {
			fmt.Fprintf(b, "complete -c outbox-relay -n '%s'%s\n", condition, known)
		}
	}
}

func fishValues(value *kong.Value) string {
	if what := namedIn(value); what != "" {
		return " -x -a '(outbox-relay complete " + what + " 2>/dev/null)'"
	}
	if value.Enum != "" {
		return " -x -a '" + strings.ReplaceAll(value.Enum, ",", " ") + "'"
	}
	return ""
}

type manCmd struct{}

func (manCmd) Help() string {
	return `Prints the manual page, made from the same texts as --help:

  outbox-relay man > /usr/local/share/man/man1/outbox-relay.1`
}

func (manCmd) Run(inv *cli.Invocation, kctx *kong.Context) error {
	var b strings.Builder
	b.WriteString(".TH OUTBOX-RELAY 1\n.SH NAME\noutbox-relay \\- deliver the events that a service commits to its outbox table\n")
	b.WriteString(".SH SYNOPSIS\n.B outbox-relay\n.I command\n[flags]\n.SH DESCRIPTION\n.nf\n" + roff(overview) + ".fi\n.SH COMMANDS\n")
	walkCommands(kctx.Model.Node, "", func(path string, node *kong.Node) {
		if path == "" || len(node.Children) > 0 {
			return
		}
		fmt.Fprintf(&b, ".SS outbox-relay%s\n%s\n", roff(path), roff(node.Help))
		if node.Detail != "" {
			fmt.Fprintf(&b, ".PP\n.nf\n%s\n.fi\n", roff(node.Detail))
		}
		for _, positional := range node.Positional {
			fmt.Fprintf(&b, ".TP\n.I %s\n%s\n", roff(positional.Name), roff(positional.Help))
		}
		for _, flag := range node.Flags {
			if !flag.Hidden {
				fmt.Fprintf(&b, ".TP\n.B %s\n%s\n", roff("--"+flag.Name), roff(flag.Help))
			}
		}
	})
	_, err := io.WriteString(inv.Stdout, b.String())
	return err
}

// roff returns a text in which nothing is a command to roff.
func roff(text string) string {
	var b strings.Builder
	for line := range strings.Lines(strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(text)) {
		if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
			b.WriteString(`\&`)
		}
		b.WriteString(line)
	}
	return b.String()
}
