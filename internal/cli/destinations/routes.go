package destinations

import (
	"context"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/internal/settings"
	"github.com/outbox-relay/outbox-relay/relay"
)

// Routes is the command routes.
type Routes struct {
	List listRoutes `cmd:"" help:"List the stored routes with what waits for their destinations, which relays have them, and how they differ from the configuration."`
	Test testRoutes `cmd:"" help:"Show where events of a type go; exit 6 if they would be parked."`
}

type listRoutes struct {
	config.DatabaseFlags
	JSON bool `help:"Print JSON: {routes, missing}. Fields are added, never renamed or removed."`
}

// ListedRoute is a stored route beside the configuration.
type ListedRoute struct {
	ops.RouteStatus
	// Configured: the configuration has it too; null without a configuration.
	Configured *bool `json:"configured"`
}

// RouteList is what routes list --json prints.
type RouteList struct {
	Routes []ListedRoute `json:"routes"`
	// Missing are routes of the configuration that the database does not have.
	Missing []configuredRoute `json:"missing"`
}

type configuredRoute struct {
	Event       string `json:"event"`
	Destination string `json:"destination"`
}

// configuredRoutes returns the configuration's routes; none if only the database was configured.
func configuredRoutes(c *config.Config) (all []configuredRoute) {
	for _, route := range c.Relay.Routes {
		for _, destination := range route.To {
			all = append(all, configuredRoute{route.Event, destination})
		}
	}
	return all
}

func (cmd listRoutes) Run(inv *cli.Invocation) error {
	c, err := config.Read(inv, "database", "routes")
	if err != nil {
		return err
	}
	list := RouteList{Routes: []ListedRoute{}, Missing: []configuredRoute{}}
	wanted := configuredRoutes(c)
	err = c.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) error {
		stored, err := outbox.Routes(ctx, "")
		list.Missing = append(list.Missing, wanted...)
		for _, r := range stored {
			listed := ListedRoute{RouteStatus: r}
			if len(wanted) > 0 {
				same := configuredRoute{r.Event, r.Destination}
				configured := slices.Contains(wanted, same)
				listed.Configured = &configured
				list.Missing = slices.DeleteFunc(list.Missing, func(w configuredRoute) bool { return w == same })
			}
			list.Routes = append(list.Routes, listed)
		}
		return err
	})
	if err != nil {
		return err
	}
	return output.Show(inv.Stdout, cmd.JSON, list, func(w io.Writer, list RouteList) error { return printRoutes(w, list, len(wanted) > 0) })
}

func printRoutes(w io.Writer, list RouteList, compared bool) error {
	header := "EVENT\tDESTINATION\tPENDING\tRELAYS"
	if compared {
		header += "\tCONFIGURED"
	}
	err := output.Table(w, "No route is stored: a relay writes its own when it starts.", header, list.Routes, func(r ListedRoute) []any {
		cells := []any{r.Event, r.Destination, plain.UpTo(r.Pending, 10_000), relayNames(r.Relays)}
		if r.Configured != nil {
			cells = append(cells, map[bool]string{true: "yes", false: "no"}[*r.Configured])
		}
		return cells
	})
	if err != nil {
		return err
	}
	for _, m := range list.Missing {
		fmt.Fprintf(w, "Only configured: %s to %s\n", m.Event, m.Destination)
	}
	differ := len(list.Missing) > 0 || slices.ContainsFunc(list.Routes, func(r ListedRoute) bool { return r.Configured != nil && !*r.Configured })
	if compared && differ {
		fmt.Fprintln(w, "\nThe database has the routes of all running relays; one that starts with this configuration adds its own.")
	}
	return nil
}

// relayNames names relays by name and number.
func relayNames(relays []ops.RelayName) string {
	var names []string
	for _, r := range relays {
		names = append(names, fmt.Sprintf("%s (%d)", r.Name, r.RelayID))
	}
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

type testRoutes struct {
	config.DatabaseFlags
	EventType string `arg:"" help:"The type of an event, such as invoice.paid."`
	JSON      bool   `help:"Print JSON: {event_type, parked, stored, configured}. Fields are added, never renamed or removed."`
}

// RouteTest is what routes test --json prints.
type RouteTest struct {
	EventType string `json:"event_type"`
	// Parked: no stored route matches.
	Parked bool              `json:"parked"`
	Stored []ops.RouteStatus `json:"stored"`
	// Configured routes that match; null without a configuration.
	Configured []configuredRoute `json:"configured"`
}

var eventTypePattern = regexp.MustCompile(`^[\x21-\x7e]+$`)

func (cmd testRoutes) Run(inv *cli.Invocation) error {
	if !eventTypePattern.MatchString(cmd.EventType) || len(cmd.EventType) > 255 {
		return cli.Usagef("%s is not an event type; those are 1 to 255 printable ASCII characters without blanks", settings.Quote(cmd.EventType))
	}
	c, err := config.Read(inv, "database", "routes")
	if err != nil {
		return err
	}
	result := RouteTest{EventType: cmd.EventType}
	err = c.Ask(inv, func(ctx context.Context, outbox *ops.Outbox) (err error) {
		result.Stored, err = outbox.Routes(ctx, cmd.EventType)
		return err
	})
	if err != nil {
		return err
	}
	result.Parked = len(result.Stored) == 0
	if wanted := configuredRoutes(c); len(wanted) > 0 {
		result.Configured = output.OrEmpty(slices.DeleteFunc(wanted, func(r configuredRoute) bool {
			return !relay.Route{Event: r.Event}.Matches(cmd.EventType)
		}))
	}
	err = output.Show(inv.Stdout, cmd.JSON, result, func(w io.Writer, t RouteTest) error { return t.print(w) })
	if err == nil && result.Parked {
		return cli.Foundf("an event of type %q would be parked: no route in the database matches", cmd.EventType)
	}
	return err
}

func (t RouteTest) print(w io.Writer) error {
	for _, r := range t.Stored {
		fmt.Fprintf(w, "%s goes to %s, by the route %s\n", t.EventType, r.Destination, r.Event)
	}
	if t.Configured == nil {
		return nil
	}
	var stored, configured []string
	for _, r := range t.Stored {
		stored = append(stored, r.Destination)
	}
	for _, r := range t.Configured {
		configured = append(configured, r.Destination)
	}
	stored, configured = slices.Compact(slices.Sorted(slices.Values(stored))), slices.Compact(slices.Sorted(slices.Values(configured)))
	if slices.Equal(stored, configured) {
		return nil
	}
	where := strings.Join(configured, ", ")
	if where == "" {
		where = "nowhere: it would be parked"
	}
	_, err := fmt.Fprintf(w, "By the configuration it goes to %s, once a relay starts with it.\n", where)
	return err
}
