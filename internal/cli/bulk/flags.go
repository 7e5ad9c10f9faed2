package bulk

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// Flags are those of every command that changes many rows.
type Flags struct {
	DryRun bool `help:"Only show how many there are, and the first of them."`
	Yes    bool `short:"y" help:"Do not ask: for scripts."`
	JSON   bool `help:"Print JSON: what was found and done. Fields are added, never renamed or removed."`
}

// ReadIDs returns the ids that the arguments name. all: without ids, everything would be meant.
func (f Flags) ReadIDs(args []string, stdin io.Reader, all bool, refusal string) ([]int64, error) {
	if len(args) == 1 && args[0] == "-" && !f.Yes && !f.DryRun {
		return nil, cli.Usagef("standard input cannot both name the events and answer the question; name them as arguments, or look first with --dry-run")
	}
	// Before the ids are read: an operator at a terminal would wait for a program that waits for
	// input.
	if all && len(args) == 0 {
		return nil, cli.Usagef("%s", refusal)
	}
	return eventIDs(args, stdin)
}

// maxIDs is how many events one command takes.
const maxIDs = 1_000_000

// eventIDs returns the ids that arguments name, without duplicates.
func eventIDs(args []string, stdin io.Reader) (ids []int64, err error) {
	seen := map[int64]bool{}
	add := func(text, place string) error {
		id, err := strconv.ParseInt(text, 10, 64)
		if err != nil || id < 1 {
			return cli.Usagef("%s%s is not the id of an event; write a number such as 17", place, settings.Quote(text))
		}
		if !seen[id] {
			seen[id] = true
			ids = append(ids, id)
		}
		if len(ids) > maxIDs {
			return cli.Usagef("more than %d events were named; choose them by --type or --since", maxIDs)
		}
		return nil
	}
	for i, text := range args {
		if text != "-" {
			if err := add(text, ""); err != nil {
				return nil, err
			}
			continue
		}
		if i != 0 || len(args) > 1 {
			return nil, cli.Usagef("- reads all ids from standard input; name no others beside it")
		}
		lines := bufio.NewScanner(stdin)
		for n := 1; lines.Scan(); n++ {
			text := strings.TrimSpace(strings.TrimPrefix(lines.Text(), "\ufeff"))
			if text == "" {
				continue
			}
			if err := add(text, fmt.Sprintf("standard input, line %d: ", n)); err != nil {
				return nil, err
			}
		}
		if err := lines.Err(); errors.Is(err, bufio.ErrTooLong) {
			return nil, cli.Usagef("standard input has a line that is too long for the id of an event")
		} else if err != nil {
			return nil, fmt.Errorf("read standard input: %w", err)
		}
		if len(ids) == 0 {
			return nil, cli.Usagef("standard input names no event")
		}
	}
	return ids, nil
}

// A FlagText repeats flags as an operator could give them again.
type FlagText []string

// Add appends a flag, unless its value is empty or 0.
func (t *FlagText) Add(flag string, value any) {
	if text := fmt.Sprint(value); text != "" && text != "0" {
		*t = append(*t, plain.ShellFlag("--"+flag, output.Printable(text)))
	}
}

// AddIDs appends the id, or how many there are.
func (t *FlagText) AddIDs(one, many string, ids []int64) {
	switch len(ids) {
	case 0:
	case 1:
		*t = append(*t, fmt.Sprintf("%s %d", one, ids[0]))
	default:
		*t = append(*t, fmt.Sprintf("%d %s", len(ids), many))
	}
}
