package routes

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/outbox-relay/outbox-relay/internal/check"
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

// Matches reports whether events of a type take the route, exactly as the database decides it.
func (r Route) Matches(eventType string) bool {
	parts := strings.Split(r.Event, "*")
	first, last := parts[0], parts[len(parts)-1]
	if len(parts) == 1 {
		return eventType == r.Event
	}
	rest, ok := strings.CutPrefix(eventType, first)
	if !ok || !strings.HasSuffix(rest, last) {
		return false
	}
	rest = strings.TrimSuffix(rest, last)
	for _, part := range parts[1 : len(parts)-1] {
		if _, rest, ok = strings.Cut(rest, part); !ok {
			return false
		}
	}
	return true
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
	added, removed := 0, 0
	for route := range wanted {
		if !old[route] {
			added++
		}
	}
	for route := range old {
		if !wanted[route] {
			removed++
		}
	}
	if added+removed == 0 {
		return nil
	}
	return []string{fmt.Sprintf("routes: %d added, %d removed", added, removed)}
}
