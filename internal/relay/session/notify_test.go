package session

import (
	"context"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// armed is true while relays want to be notified.
const armed = `SELECT last_value > extract(epoch FROM now()) * 1000 FROM outbox_armed`

// hears waits for one call of Wake for notifications, and returns what was asked.
func hears(t *testing.T, s *Session, on *standing) (asked Requests) {
	t.Helper()
	s.Wake = func(requests Requests) { asked = requests }
	relaytest.Eventually(t, "a notification", func() bool {
		relaytest.Must(t, s.listen(t.Context(), on, time.Now().Add(relaytest.Patience)))
		return asked != Requests{}
	})
	return asked
}

// A producer's commit wakes an armed relay, and others' requests do; a relay that is not armed is
// left alone, and so is one of another schema, also beside a schema whose name needs care.
func TestNotificationsReachTheirSchema(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"public", `My "Odd" schema`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.New(t)
			u, err := url.Parse(dsn)
			relaytest.Must(t, err)
			query := u.Query()
			query.Set("search_path", pgx.Identifier{name}.Sanitize())
			u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20") // as PostgreSQL reads it, a plus is a plus
			db := relaytest.At(t, u.String())
			db.Exec(`CREATE SCHEMA IF NOT EXISTS ` + pgx.Identifier{name}.Sanitize())
			pgtest.Migrate(t, db.DSN, migrations.Outbox)
			db.Route()
			s, on := beating(t, relaytest.At(t, dsn), func(s *Session) { s.Config.Schema = name })
			db.Insert(1, "busy")
			relaytest.Must(t, s.Producers.Arm(t.Context(), db.Pool, true))
			if got := hears(t, s, on); got != (Requests{Commits: 1}) { // every relay hears that producers notify now
				t.Errorf("when it is armed, it is asked for %+v", got)
			}
			for _, other := range []string{"elsewhere", "sweep elsewhere", "", " ", "public2", "sweep", "schema", "sweep schema", `sweep "Odd" schema`} {
				db.Exec(`SELECT pg_notify('outbox_wake', $1)`, other)
			}
			db.Insert(1, "idle") // arrives after those
			testkit.Equal(t, "by an event it is asked for", hears(t, s, on), (Requests{Commits: 1}))
			db.Exec(`SELECT pg_notify('outbox_wake', 'sweep ' || current_schema())`)
			testkit.Equal(t, "when another relay leaves it is asked for", hears(t, s, on), (Requests{Sweep: true}))
			db.Exec(`SELECT pg_notify('outbox_wake', 'routes ' || current_schema())`)
			testkit.Equal(t, "by changed routes it is asked for", hears(t, s, on), (Requests{Routes: true}))
		})
	}
}

// What arms a relay costs producers nothing that lasts: no row that they read gets a new version.
func TestArmingLeavesNoRowVersions(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	const bytes = `SELECT pg_relation_size('outbox_armed') + pg_relation_size('outbox_relay')`
	size := relaytest.Row[int64](db, bytes)
	var p Producers
	for i := range 1000 {
		relaytest.Must(t, p.Arm(t.Context(), db.Pool, i%2 == 0))
	}
	if n := relaytest.Row[int64](db, bytes); n != size {
		t.Errorf("%d bytes became %d", size, n)
	}
	if relaytest.Row[bool](db, armed) {
		t.Error("armed by a relay that said it is busy")
	}
}

// Producers continue notifying a relay that stays idle, also when another one that is busy has
// stopped them: then its beat says that what was committed meanwhile was announced by no producer.
func TestIdleRelayStaysArmed(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	s, on := beating(t, db)
	unheard := 0
	s.Beaten = func(_ time.Time, _ int32, found News) {
		if found.Unheard {
			unheard++
		}
	}
	relaytest.Must(t, s.Producers.Arm(t.Context(), db.Pool, true))
	relaytest.Must(t, s.beat(t.Context(), on, time.Now()))
	testkit.Equal(t, "producers had not stopped", unheard, 0)
	relaytest.Must(t, new(Producers).Arm(t.Context(), db.Pool, false))
	for range 2 {
		relaytest.Must(t, s.beat(t.Context(), on, time.Now()))
	}
	if unheard != 1 || !relaytest.Row[bool](db, armed) {
		t.Errorf("%d beats say that producers had stopped", unheard)
	}
}

// A declaration fails, and by the next turn there is nothing to declare any more. Beats continue as
// the claimer does: a relay that believes that producers notify keeps them notifying.
func TestFailedDeclarationChangesNothing(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	failed, cancel := context.WithCancel(t.Context())
	cancel()
	for _, before := range []bool{true, false} {
		var p Producers
		relaytest.Must(t, p.Arm(t.Context(), db.Pool, before))
		if err := p.Arm(failed, db.Pool, !before); err == nil || p.Armed() != before {
			t.Errorf("armed: %t, then not declared: %v; beats say %t", before, err, p.Armed())
		}
	}
}

// While one relay had stopped the producers' notifications, an event may have come for another one
// alone, which hears when they begin again.
func TestArmedRelayWakesTheOthers(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	s, on := beating(t, db)
	s.looks = newThrottle(looksPerSecond, looksPerSecond)
	var other Producers
	relaytest.Must(t, other.Arm(t.Context(), db.Pool, false))
	relaytest.Must(t, other.Arm(t.Context(), db.Pool, true))
	var heard int
	s.Wake = func(asked Requests) { heard += asked.Commits }
	relaytest.Must(t, s.listen(t.Context(), on, time.Now().Add(relaytest.Patience)))
	testkit.Equal(t, "heard", heard, 1)
}

// A stranger sends more notifications than a session can read beside its heartbeat. The relay stops
// listening for a while, keeps its number, and listens again.
func TestSecurityFloodIsNotListenedTo(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t)
	r := prepared(db)
	r.DeafFor = 2 * time.Second
	r.begin()
	relayID := r.alive()
	_, err := relaytest.Stranger(db, "psql").Exec(t.Context(), `SELECT count(pg_notify('outbox_wake', i || repeat('x', 7900))) FROM generate_series(1, 2000) i`)
	relaytest.Must(t, err)
	r.await("listening again", func() bool { return slices.Equal(r.listening, []bool{true, false, true}) })
	if again := r.alive(); again != relayID || len(r.failures) > 0 {
		t.Errorf("relay %d became %d, failed %v", relayID, again, r.failures)
	}
}
