package watch

import (
	"context"
	"slices"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
)

// Current returns those of the open alerts that a look would keep open, with the details of now.
// Looks are seconds apart, on a slow database half a minute or more: meanwhile what is stored says
// what was. The limits are those of the relay that looked last. Nothing is written.
func Current(ctx context.Context, q pg.DB, open []alert.Alert) ([]alert.Alert, error) {
	if len(open) == 0 {
		return open, nil
	}
	if changed := func(a alert.Alert) bool { return a.Rule == alert.RuleRoutesChanged }; slices.ContainsFunc(open, changed) {
		disagree, err := relaysDisagree(ctx, q)
		if err != nil {
			return open, err
		}
		if !disagree { // a look ends the alert some seconds later
			open = slices.DeleteFunc(slices.Clone(open), changed)
		}
	}
	seen, known, err := inspect(ctx, q)
	if err != nil || !known {
		return open, err
	}
	hold, ended := seen.conditions(seen.Terms.limits(), nil)
	current := []alert.Alert{}
	for _, a := range open {
		about := subject{a.Rule, a.Subject}
		over := slices.ContainsFunc(ended, func(e alertSample) bool { return e.subject == about })
		if a.Rule == alert.RuleArchive { // its schedule is not known here
			over = seen.Archive != nil && seen.Archive.At.After(a.OpenedAt)
		}
		if over {
			continue
		}
		for _, c := range hold {
			if c.subject == about {
				a.Detail = c.detail
			}
		}
		current = append(current, a)
	}
	return current, nil
}
