package browser

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/chromedp"

	"github.com/outbox-relay/outbox-relay/internal/relay/history"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A page whose relay does not answer says since when, in text and to screen readers, and says no
// more of it once it is back.
func TestRelayGoesAndComesBack(t *testing.T) {
	t.Parallel()
	s := open(t, relaytest.Covered(t), history.New(), 1280, "light")
	s.expected = []string{"ERR_INTERNET_DISCONNECTED", "console: error"}
	s.visit("/")
	s.reads("No relay is running")
	if said := evaluate[string](s, `document.getElementById("said").textContent`); said != "" {
		t.Errorf("what has not changed is announced: %q", said)
	}
	emulate := func(offline bool) { s.run(network.EmulateNetworkConditions(offline, 0, -1, -1)) }
	emulate(true)
	s.reads("The relay has not answered since")
	testkit.Contains(t, "announced", evaluate[string](s, `document.getElementById("said").textContent`), "has not answered")
	emulate(false)
	relaytest.Eventually(s, "an answer", func() bool { return evaluate[bool](s, `document.getElementById("unreached").hidden`) })
}

// An accessible is a node of the tree that assistive technology reads.
type accessible struct {
	Ignored bool    `json:"ignored"`
	Role    axValue `json:"role"`
	Name    axValue `json:"name"`
}

type axValue struct {
	Value any `json:"value"`
}

// What the browser tells assistive technology of each page has its landmarks, and a name for
// whatever can be used.
func TestAccessibilityTree(t *testing.T) {
	t.Parallel()
	db := outage(t)
	s := open(t, db, lastHour(db), 1280, "light")
	usable := []string{"button", "link", "textbox", "searchbox", "combobox", "checkbox", "columnheader", "heading", "figure", "progressbar", "DisclosureTriangle"}
	for _, path := range []string{"/", "/destinations/crm", "/events?status=failed", "/events/1301", "/operations/new?action=replay&status=failed&destination=crm", "/alerts", "/relays", "/audit", "/operations/2"} {
		s.visit(path)
		var tree struct {
			Nodes []accessible `json:"nodes"`
		} // not the type of cdproto, which does not know what newer browsers say
		s.run(accessibility.Enable(), chromedp.ActionFunc(func(ctx context.Context) error {
			return cdp.Execute(ctx, accessibility.CommandGetFullAXTree, nil, &tree)
		}))
		count := map[string]int{}
		for _, n := range tree.Nodes {
			if n.Ignored {
				continue
			}
			role := fmt.Sprint(n.Role.Value)
			count[role]++
			if name, _ := n.Name.Value.(string); slices.Contains(usable, role) && strings.TrimSpace(name) == "" {
				t.Errorf("%s: a %s has no name", path, role)
			}
		}
		for role, least := range map[string]int{"banner": 1, "navigation": 1, "main": 1, "contentinfo": 1, "search": 1, "status": 1, "heading": 1} {
			if count[role] < least {
				t.Errorf("%s: %d %s", path, count[role], role)
			}
		}
		if count["main"] != 1 || count["banner"] != 1 {
			t.Errorf("%s: landmarks %v", path, count)
		}
	}
}
