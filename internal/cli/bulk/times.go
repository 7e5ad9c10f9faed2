package bulk

import (
	"context"
	"strings"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// TimeFlags bound when events were created.
type TimeFlags struct {
	Since string `placeholder:"TIME" help:"Only events created since then: 2026-01-02T15:04:05Z, or 2h for two hours ago."`
	Until string `placeholder:"TIME" help:"Only events created before then."`
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
		return moment{}, cli.Usagef("--%s: %s has no zone; write %sZ for UTC, or +02:00 in place of Z", flag, settings.Quote(text), text)
	}
	if _, err := time.Parse(time.DateOnly, text); err == nil {
		return moment{}, cli.Usagef("--%s: %s has no time; write %sT00:00:00Z", flag, settings.Quote(text), text)
	}
	ago, problem := settings.ParseDuration(text)
	switch {
	case problem == "":
		return moment{flag: flag, ago: ago}, nil
	case strings.ContainsAny(text, "0123456789") && !strings.ContainsAny(text, "-:T"):
		return moment{}, cli.Usagef("--%s: %s", flag, problem)
	}
	return moment{}, cli.Usagef("--%s: %s is neither a time such as 2026-01-02T15:04:05Z nor a duration such as 2h", flag, settings.Quote(text))
}

// before returns the time that a moment means at now; the zero time for none.
func (m moment) before(now time.Time) (time.Time, error) {
	switch {
	case m.ago > 0:
		return now.Add(-m.ago), nil
	case m.at.After(now):
		return m.at, cli.Usagef("--%s: %s lies in the future; the database's clock says %s", m.flag, m.at.Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	return m.at, nil
}

// A clock is the database's: it dated the events.
type clock interface {
	Now(ctx context.Context) (time.Time, error)
}

// Bounds turns --since and --until into times.
func (f TimeFlags) Bounds(ctx context.Context, database clock) (since, until time.Time, err error) {
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
		return since, until, cli.Usagef("--since %s is not before --until %s", f.Since, f.Until)
	}
	return since, until, nil
}

func (f TimeFlags) moments() (from, to moment, err error) {
	if from, err = parseMoment("since", f.Since); err == nil {
		to, err = parseMoment("until", f.Until)
	}
	return from, to, err
}

// Check refuses bounds that are wrong whatever the time is, before a database is asked.
func (f TimeFlags) Check() error {
	_, _, err := f.moments()
	return err
}
