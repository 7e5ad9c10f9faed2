package take

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/intake"
	"github.com/outbox-relay/outbox-relay/internal/relay/join"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relay/session"
	"github.com/outbox-relay/outbox-relay/internal/relay/settle"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// newTaker returns what takes events for the destinations, from which nothing is sent, and the
// relay as which it does. Without a database, it must not take any.
func newTaker(t testing.TB, db *relaytest.Database, destinations ...string) (c *Taker, relayID int32) {
	t.Helper()
	all := lane.New(func(d post.Destination) (*post.Endpoint, error) { return post.NewEndpoint(d, "") })
	var list []post.Destination
	for _, name := range destinations {
		list = append(list, post.Destination{Name: name, URL: "http://receiver.test/"}.WithDefaults(post.Egress{}))
	}
	relaytest.Must(t, all.Set(time.Now(), list, nil))
	c = &Taker{
		Lease: time.Hour, PollInterval: time.Hour, MaxInFlight: func() int { return 256 },
		Lanes: all, Hands: &Hands{}, Agenda: &agenda.Agenda{}, Pace: &agenda.Pace{Poll: time.Hour}, Clock: &pg.Clock{}, Settler: settle.New(),
		Start: func(*lane.Lane) {}, Reparked: func() {},
	}
	if db != nil {
		c.DB = db.Pool
		var err error
		relayID, err = session.Register(t.Context(), db.Pool, false, "test", "", time.Hour)
		relaytest.Must(t, err)
	}
	c.Joins = &join.Keys{DB: c.DB, Lanes: all, Agenda: c.Agenda}
	return c, relayID
}

// While the database does not answer, a range that was taken over continues waiting with all that
// follows it, and the turn says so: it would be repeated without a wait and without a word.
func TestErrorOfARescuedRangeEndsTheTurn(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	c, relayID := newTaker(t, db, "default")
	key := ordering.Key{Destination: "default", Key: "k"}
	c.awaiting = []awaitingRange{
		{relayID: relayID, seq: 1, rescued: &intake.Range{Seq: 1}, keys: []ordering.Key{key}},
		{relayID: relayID, seq: 2, rescued: &intake.Range{Seq: 2}, keys: []ordering.Key{key}},
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	testkit.ErrorIs(t, "got", c.RecheckAwaiting(ctx, relayID), context.Canceled)
	testkit.Equal(t, "ranges wait", len(c.awaiting), 2)
}

// While what is left of a cut difference waits for room, the claimer makes rows of what came after
// it for the lanes that may send it.
func TestClaimerPassesACut(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t, "bulk", "other")
	db.Exec(`DELETE FROM outbox_route; INSERT INTO outbox_route VALUES ('bulk', 'bulk'), ('other', 'other');
		INSERT INTO outbox_destination (destination, paused, paused_at) VALUES ('bulk', true, now()) ON CONFLICT (destination) DO UPDATE SET paused = true, paused_at = now()`)
	c, relayID := newTaker(t, db, "bulk", "other")
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) SELECT 'bulk', '{}', 'bulk-' || i FROM generate_series(1, 4) i`)
	_, err := intake.TakeRange(t.Context(), db.Pool, relayID, intake.Terms{Events: 2, Inline: 1 << 20}, true)
	relaytest.Must(t, err)
	db.Exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('other', '{}', 'other-1'), ('bulk', '{}', 'bulk-5'), ('nowhere', '{}', 'x')`)
	c.cut = true
	relaytest.Must(t, c.PassCut(t.Context(), relayID))
	if got := relaytest.Rows[string](db, `SELECT destination FROM outbox_delivery`); len(got) != 1 || got[0] != "other" {
		t.Errorf("rows for %v", got)
	}
}

// An event without a time is due when its transaction begins, also if the statement that takes it
// began before: on a busy server the snapshot of a statement is taken some time after its begin.
func TestEventsWithoutATimeJoinWithTheirRange(t *testing.T) {
	t.Parallel()
	c, _ := newTaker(t, nil, "default")
	c.routes = intake.NewRoutes([]intake.Route{{Pattern: "*", Destination: "default"}})
	at, key, kind, version := pgtype.Timestamptz{Time: time.Now(), Valid: true}, "k", "t", 1
	event := intake.Event{ID: 1, AvailableAt: at, Wait: 50 * time.Millisecond}
	event.EventType, event.Version, event.Key, event.OrderingKey, event.CreatedAt = &kind, &version, &key, &key, at
	_, all := c.spread(c.newTargets(), 1, &intake.Range{Seq: 1, TakenAt: at.Time, Events: []intake.Event{event}}, time.Now())
	if len(all) != 1 || !all[0].Given.Scheduled.IsZero() || all[0].Given.Wait > 0 {
		t.Fatalf("%+v", all)
	}
}

// The end of a range whose take a crash of the server has undone takes none out of this relay's
// hands that has got its number since.
func TestNumberOfARangeIsGivenOutAgain(t *testing.T) {
	t.Parallel()
	undone, again := intake.RangeRef{Seq: 100, Fence: 2}, intake.RangeRef{Seq: 100, Fence: 4}
	var h Hands
	h.add(undone)
	h.add(again)
	h.Remove(undone)
	testkit.Equal(t, "in hand", h.fences(), []int64{4})
	h.Remove(again)
	testkit.Equal(t, "in hand", h.fences(), []int64{})
}

// What this relay had rescued when it was taken for dead is not in its hands any more.
func TestRelayTakenForDeadHasNothingRescued(t *testing.T) {
	t.Parallel()
	c, _ := newTaker(t, nil, "default")
	rescued := intake.Range{Seq: 90, Fence: 2}
	c.Hands.add(rescued.Ref())
	c.awaiting = []awaitingRange{{relayID: 1, seq: rescued.Seq, rescued: &rescued}}
	relaytest.Must(t, c.RecheckAwaiting(t.Context(), 2))
	testkit.Equal(t, "in hand", c.Hands.fences(), []int64{})
	testkit.Equal(t, "ranges that wait", len(c.awaiting), 0)
}

// slow reads payloads for longer than a statement may take.
type slow struct{ *pgxpool.Pool }

func (s slow) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if slices.Contains(args, any(lane.InlinePayload)) {
		return nil, &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "57014", Message: "canceling statement due to statement timeout"}
	}
	return s.Pool.Query(ctx, sql, args...)
}

// A take that reads payloads for too long is not repeated as it was.
func TestSlowTakeIsRepeatedWithoutPayloads(t *testing.T) {
	t.Parallel()
	db := relaytest.New(t)
	r := start(t, db, "default")
	r.DB = slow{db.Pool}
	db.Insert(2, "huge")
	for range 2 { // one may have met a database that stood still
		if err := r.TakeEvents(t.Context(), r.relayID, true); !pg.HasCode(err, "57014") {
			t.Fatalf("a take with payloads: %v", err)
		}
	}
	r.take(t)
	testkit.Equal(t, "taken", r.deliver("default"), []string{"huge-1", "huge-2"})
}
