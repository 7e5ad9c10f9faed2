package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/relay/ops"
)

// timeFlags bound when events were created.
type timeFlags struct {
	Since string `placeholder:"TIME" help:"Only events created since then: 2026-01-02T15:04:05Z, or 2h for two hours ago."`
	Until string `placeholder:"TIME" help:"Only events created before then."`
}

// selectionFlags choose deliveries by what stands in them.
type selectionFlags struct {
	IDs         []string `arg:"" optional:"" name:"event-id" help:"Events whose deliveries are meant; - reads them from standard input, one a line."`
	Destination string   `placeholder:"NAME" help:"Only deliveries to this destination."`
	Type        string   `placeholder:"PATTERN" help:"Only events of these types; * stands for any characters."`
	Reason      string   `placeholder:"REASON" help:"Only deliveries whose last attempt ended so: rejected, timeout, …"`
	OrderingKey string   `placeholder:"KEY" help:"Only events with this ordering key."`
	timeFlags
	Limit *int64 `placeholder:"N" help:"At most so many deliveries."`
	bulkFlags
}

// maxIDs is how many events one command takes.
const maxIDs = 1_000_000

// usagef returns an error about how the command was called.
func usagef(format string, args ...any) error {
	return exitError{code: exitUsage, err: fmt.Errorf(format, args...)}
}

// A moment is a point in time as an operator gives it. The zero value is none.
type moment struct {
	flag string
	at   time.Time
	ago  time.Duration // 0: at counts
}

// parseMoment reads a --since or --until.
func parseMoment(flag, text string) (moment, error) {
	if text == "" {
		return moment{}, nil
	}
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return moment{flag: flag, at: at}, nil
	}
	if _, err := time.Parse(time.RFC3339, text+"Z"); err == nil {
		return moment{}, usagef("--%s: %s has no zone; write %sZ for UTC, or +02:00 in place of Z", flag, settings.Quote(text), text)
	}
	if _, err := time.Parse(time.DateOnly, text); err == nil {
		return moment{}, usagef("--%s: %s has no time; write %sT00:00:00Z", flag, settings.Quote(text), text)
	}
	ago, problem := settings.ParseDuration(text)
	switch {
	case problem == "":
		return moment{flag: flag, ago: ago}, nil
	case strings.ContainsAny(text, "0123456789") && !strings.ContainsAny(text, "-:T"):
		return moment{}, usagef("--%s: %s", flag, problem)
	}
	return moment{}, usagef("--%s: %s is neither a time such as 2026-01-02T15:04:05Z nor a duration such as 2h", flag, settings.Quote(text))
}

// before returns the time that a moment means at now; the zero time for none.
func (m moment) before(now time.Time) (time.Time, error) {
	switch {
	case m.ago > 0:
		return now.Add(-m.ago), nil
	case m.at.After(now):
		return m.at, usagef("--%s: %s lies in the future; the database's clock says %s", m.flag, m.at.Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	return m.at, nil
}

// A clock is the database's: it dated the events.
type clock interface {
	Now(ctx context.Context) (time.Time, error)
}

// bounds turns --since and --until into times.
func (f timeFlags) bounds(ctx context.Context, database clock) (since, until time.Time, err error) {
	from, to, err := f.moments()
	if err != nil || from == (moment{}) && to == (moment{}) {
		return since, until, err
	}
	now, err := database.Now(ctx)
	if err != nil {
		return since, until, err
	}
	if since, err = from.before(now); err != nil {
		return since, until, err
	}
	if until, err = to.before(now); err != nil {
		return since, until, err
	}
	if f.Since != "" && f.Until != "" && !since.Before(until) {
		return since, until, usagef("--since %s is not before --until %s", f.Since, f.Until)
	}
	return since, until, nil
}

func (f timeFlags) moments() (from, to moment, err error) {
	if from, err = parseMoment("since", f.Since); err == nil {
		to, err = parseMoment("until", f.Until)
	}
	return from, to, err
}

// check refuses bounds that are wrong whatever the time is, before a database is asked.
func (f timeFlags) check() error {
	_, _, err := f.moments()
	return err
}

// eventIDs returns the ids that arguments name, without duplicates.
func eventIDs(args []string, stdin io.Reader) (ids []int64, err error) {
	seen := map[int64]bool{}
	add := func(text, place string) error {
		id, err := strconv.ParseInt(text, 10, 64)
		if err != nil || id < 1 {
			return usagef("%s%s is not the id of an event; write a number such as 17", place, settings.Quote(text))
		}
		if !seen[id] {
			seen[id] = true
			ids = append(ids, id)
		}
		if len(ids) > maxIDs {
			return usagef("more than %d events were named; choose them by --type or --since", maxIDs)
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
			return nil, usagef("- reads all ids from standard input; name no others beside it")
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
			return nil, usagef("standard input has a line that is too long for the id of an event")
		} else if err != nil {
			return nil, fmt.Errorf("read standard input: %w", err)
		}
		if len(ids) == 0 {
			return nil, usagef("standard input names no event")
		}
	}
	return ids, nil
}

// selection returns what was asked for, but for its times. statuses and parked come from the command's own flags.
func (f selectionFlags) selection(inv *invocation, statuses []string, parked bool) (s ops.Selection, err error) {
	s = ops.Selection{
		Destination: f.Destination, Parked: parked, Statuses: statuses, Type: f.Type, Reason: f.Reason, OrderingKey: f.OrderingKey,
	}
	if f.Limit != nil {
		if s.Limit = *f.Limit; s.Limit < 1 {
			return s, usagef("--limit: %d is out of range; write 1 or more", s.Limit)
		}
	}
	if err := f.check(); err != nil {
		return s, err
	}
	s.EventIDs, err = f.ids(f.IDs, inv.Stdin, s.Empty() && f.Since == "" && f.Until == "",
		"nothing says which deliveries are meant; name events, or narrow it with --destination, --status, --type, --reason, --ordering-key, --since or --until")
	return s, err
}

// ids returns the ids that the arguments name. all: without ids, everything would be meant.
func (f bulkFlags) ids(args []string, stdin io.Reader, all bool, refusal string) ([]int64, error) {
	if len(args) == 1 && args[0] == "-" && !f.Yes && !f.DryRun {
		return nil, usagef("standard input cannot both name the events and answer the question; add --yes, or --dry-run to look first")
	}
	// Before the ids are read: an operator at a terminal would wait for a program that waits for input.
	if all && len(args) == 0 {
		return nil, usagef("%s", refusal)
	}
	return eventIDs(args, stdin)
}

// describe repeats the selection in an audit line: every flag, but only the number of named events.
func (f selectionFlags) describe(s ops.Selection) string {
	text := flagText{}
	text.ids("event", "events", s.EventIDs)
	text.add("destination", s.Destination)
	text.add("status", strings.Join(s.Statuses, ","))
	if s.Parked {
		text = append(text, "--parked")
	}
	text.add("type", s.Type)
	text.add("reason", s.Reason)
	text.add("ordering-key", s.OrderingKey)
	text.add("since", f.Since)
	text.add("until", f.Until)
	text.add("limit", s.Limit)
	return strings.Join(text, " ")
}

// A flagText repeats flags as an operator could give them again.
type flagText []string

// add appends a flag, unless its value is empty or 0.
func (t *flagText) add(flag string, value any) {
	if text := fmt.Sprint(value); text != "" && text != "0" {
		*t = append(*t, "--"+flag+" "+plain.ShellWord(printable(text)))
	}
}

func (t *flagText) ids(one, many string, ids []int64) {
	switch len(ids) {
	case 0:
	case 1:
		*t = append(*t, fmt.Sprintf("%s %d", one, ids[0]))
	default:
		*t = append(*t, fmt.Sprintf("%d %s", len(ids), many))
	}
}
