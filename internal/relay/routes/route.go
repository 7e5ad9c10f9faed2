package routes

import (
	"fmt"
	"regexp"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
)

// A Route sends the event types that match Event to the destinations in To.
type Route struct {
	// Event is an event type in which '*' stands for any characters: "*", "invoice.*".
	Event string
	// To names destinations.
	To []string
}

// The length is compared beside it: {1,255} would be 255 copies in memory.
var routePattern = regexp.MustCompile(`^[\x21-\x7e]+$`)

// Problems returns every mistake in the route that stands at the given path of a configuration with
// these destinations.
func (r Route) Problems(path string, destinations map[string]bool) []check.Problem {
	var v check.Problems
	v.Require(routePattern.MatchString(r.Event) && len(r.Event) <= 255, path+".event",
		"%q is not an event type or pattern; write one such as \"invoice.paid\", \"invoice.*\" or \"*\"", r.Event)
	v.Require(len(r.To) > 0, path+".to", "names no destination")
	for _, name := range r.To {
		v.Require(destinations[name], path+".to", "there is no destination %q", name)
	}
	return v
}

// Matches reports whether events of a type take the route.
func (r Route) Matches(eventType string) bool {
	return intake.NewRoutes([]intake.Route{{Pattern: r.Event, Destination: "one"}}).Destinations(eventType) != nil
}

// A Row is one line of outbox_route.
type Row struct {
	Pattern     string
	Destination string
}

// Rows returns the routes of a configuration as the database stores them.
func Rows(list []Route) map[Row]bool {
	rows := map[Row]bool{}
	for _, route := range list {
		for _, destination := range route.To {
			rows[Row{Pattern: route.Event, Destination: destination}] = true
		}
	}
	return rows
}

// Differences says in one text how the routes of two configurations differ; nil: they do not.
func Differences(list, next []Route) []string {
	old, wanted := Rows(list), Rows(next)
	added, removed := len(missingRoutes(wanted, old)), len(missingRoutes(old, wanted))
	if added+removed == 0 {
		return nil
	}
	return []string{fmt.Sprintf("routes: %d added, %d removed", added, removed)}
}
