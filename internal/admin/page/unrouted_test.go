package page

import (
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// An event that no relay has taken is shown apart: on the first page, in the list, on its own page
// and before an operation on it.
func TestPageOfUnroutedEvents(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	db.Insert(2, "k")
	s := serve(t, db.Pool)
	for path, want := range map[string]string{
		"/":                                   " · 2 not yet routed",
		"/events":                             "2 events are not yet routed, and not listed here",
		"/events?status=pending":              "2 events are not yet routed, and not listed here",
		"/events/1":                           "not yet routed: no relay has taken it yet",
		"/operations/new?action=discard&id=1": "1 event not routed yet; repeat this later",
	} {
		s.gets(200, path, want)
	}
	if _, body := s.get("/events?status=failed"); strings.Contains(body, "not yet routed") {
		t.Errorf("among what failed:\n%s", body)
	}
}
