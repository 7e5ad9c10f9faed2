package relay

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/routes"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// storedRoutes returns the routes that producers' events take, sorted, such as "* default, t
// other".
func storedRoutes(db *relaytest.Database) string {
	db.Helper()
	return relaytest.Row[string](db, "SELECT coalesce(string_agg(pattern || ' ' || destination, ', ' ORDER BY pattern, destination), '') FROM outbox_route")
}

// routesOfConfig returns a configuration's routes as storedRoutes does.
func routesOfConfig(cfg Config) string {
	var texts []string
	for route := range routes.Rows(cfg.withDefaults().Routes) {
		texts = append(texts, route.Pattern+" "+route.Destination)
	}
	slices.Sort(texts)
	return strings.Join(texts, ", ")
}

// A relay applies its routes when it starts and when its session comes back, withdraws them when it
// stops, and follows what others change. In a deploy, the session of an old relay is cut while one
// with a newer configuration runs beside it: events for the new destination must not be lost to the
// old one's routes.
func TestRoutesFollowTheRelays(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.Exec("DELETE FROM outbox_route")
	rc := relaytest.NewReceiver(t, nil)
	logistics, analytics := named("logistics", to(rc.URL)), named("analytics", to(rc.URL))
	cfg := config(db, logistics)
	cfg.Watching.Interval = 100 * time.Millisecond
	older := start(t, cfg)
	relayID := older.relayID()
	newer := start(t, config(db, logistics, analytics))
	newer.relayID()
	const both = "* analytics, * logistics"
	testkit.Equal(t, "the routes", storedRoutes(db), both)

	before := relaytest.Row[int](db, "SELECT session_pid FROM outbox_relay WHERE id = $1", relayID)
	db.Exec(`SELECT pg_terminate_backend($1)`, before)
	relaytest.Becomes(db, 2, "SELECT count(*)::int FROM outbox_relay r WHERE session_pid <> $1 AND "+pg.HasSession, before)
	db.Insert(1, "k")
	relaytest.Becomes(db, 2, "SELECT count(*)::int FROM outbox_delivery WHERE status = 'delivered'")
	testkit.Equal(t, "the old relay left these routes", storedRoutes(db), both)

	newer.stop()
	relaytest.Eventually(t, "the end of the new relay's routes", func() bool { return storedRoutes(db) == "* logistics" })
	db.Exec("DELETE FROM outbox_route") // by hand
	relaytest.Eventually(t, "the routes of the old relay", func() bool { return storedRoutes(db) == "* logistics" })
	if got := relaytest.Row[string](db, "SELECT detail FROM outbox_alert WHERE rule = 'routes_changed'"); !strings.HasSuffix(got, ": added * to logistics") {
		t.Errorf("the alert is %q", got)
	}
}
