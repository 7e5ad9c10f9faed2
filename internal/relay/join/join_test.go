package join

import (
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localpg/pgtest"
	"github.com/outbox-relay/outbox-relay/internal/relay/agenda"
	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
	"github.com/outbox-relay/outbox-relay/internal/relay/ordering"
	"github.com/outbox-relay/outbox-relay/internal/relay/post"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.RunTests(m) }

func newKeys(t *testing.T, db *relaytest.Database) *Keys {
	t.Helper()
	lanes := lane.New(func(d post.Destination) (*post.Endpoint, error) { return post.NewEndpoint(d, "") })
	relaytest.Must(t, lanes.Set(time.Now(), []post.Destination{post.Destination{Name: "default", URL: "http://receiver.test/"}.WithDefaults(post.Egress{})}, nil))
	return &Keys{DB: db.Pool, Lanes: lanes, Agenda: &agenda.Agenda{}, Failed: func(operation string, err error) { t.Errorf("%s: %v", operation, err) }}
}

// ready returns the keys that the next claim asks for.
func ready(j *Keys) (keys []string) {
	all, _ := j.Lanes.Get("default").TakeReady([lane.Classes]int{100, 100, 100})
	for _, k := range all {
		keys = append(keys, k.Key)
	}
	return keys
}

func key(name string) ordering.Key { return ordering.Key{Destination: "default", Key: name} }

// Rows that have become due join their keys in the order of their times, and the keys can be
// claimed then.
func TestWhatIsDueJoinsItsKey(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.InsertKeyed("k", 1, 3)
	db.InsertKeyed("later", 4, 4)
	db.Exec(`UPDATE outbox_delivery SET joined = NULL, next_attempt_at = now() - event_id * interval '1 second'`)
	db.Exec(`UPDATE outbox_delivery SET next_attempt_at = now() + interval '1 hour' WHERE ordering_key = 'later'`)
	j := newKeys(t, db)
	j.Add(key("k"), lane.Backlog)
	j.Add(ordering.Key{Destination: "unserved", Key: "k"}, lane.Live)
	if due := j.Agenda.Take(time.Now()); !due.Has(agenda.CauseJoinKeys | agenda.CauseTakeAgain) {
		t.Errorf("due: %s", due)
	}
	relaytest.Must(t, j.Run(t.Context(), relaytest.Row[time.Time](db, `SELECT now()`)))
	if got := relaytest.Rows[int64](db, `SELECT event_id FROM outbox_delivery WHERE joined IS NOT NULL ORDER BY joined, event_id`); len(got) != 3 || got[0] != 3 || got[2] != 1 {
		t.Errorf("joined in the order %v", got)
	}
	if got := ready(j); len(got) != 1 || got[0] != "k" {
		t.Errorf("ready: %v", got)
	}
	if len(j.keys) != 0 {
		t.Errorf("left: %v", j.keys)
	}
}

// While everything that was committed has not been taken since a row became due, nothing joins:
// what was due before it comes first.
func TestNothingJoinsBeforeATake(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.InsertKeyed("k", 1, 1)
	db.Exec(`UPDATE outbox_delivery SET joined = NULL, next_attempt_at = now() - interval '1 second'`)
	j := newKeys(t, db)
	j.Add(key("k"), lane.Live)
	j.Agenda.Take(time.Now())
	relaytest.Must(t, j.Run(t.Context(), relaytest.Row[time.Time](db, `SELECT now() - interval '1 hour'`)))
	if got := ready(j); len(got) != 0 || len(j.keys) != 1 {
		t.Errorf("ready: %v, left: %v", got, j.keys)
	}
	if due := j.Agenda.Take(time.Now().Add(time.Second)); !due.Has(agenda.CauseTakeAgain | agenda.CauseJoinKeys) {
		t.Errorf("due: %s", due)
	}
	relaytest.Must(t, j.Run(t.Context(), relaytest.Row[time.Time](db, `SELECT now()`)))
	if got := ready(j); len(got) != 1 {
		t.Error("it never joins")
	}
}

// A key that something has joined is claimed again, however it came to be noted.
func TestJoinedKeyIsClaimedAgain(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.InsertKeyed("k", 1, 2)
	db.Exec(`UPDATE outbox_delivery SET joined = NULL, next_attempt_at = now() - interval '1 second'`)
	j := newKeys(t, db)
	j.AddJoined(key("j"))
	j.add(key("j"), join{class: lane.Backlog, done: true, first: ordering.Place{Event: 7}})
	relaytest.Must(t, j.Run(t.Context(), time.Time{}))
	if got, _ := j.Lanes.Get("default").TakeReady([lane.Classes]int{9, 9, 9}); len(got) != 1 || got[0].Class != lane.Live || got[0].Found != (ordering.Place{Event: 7}) {
		t.Errorf("ready: %+v", got)
	}
	relaytest.Must(t, j.Before(t.Context(), 0, nil, nil))
	if len(j.keys) != 0 {
		t.Errorf("nothing was asked, and noted: %v", j.keys)
	}
}

// A key whose rows cannot be joined is put off, and keeps no other from being joined.
func TestKeyThatCannotBeJoinedWaitsAlone(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.InsertKeyed("good", 1, 2)
	db.InsertKeyed("bad", 1, 2)
	db.Exec(`UPDATE outbox_delivery SET joined = NULL, next_attempt_at = now() - interval '1 second'`)
	db.Refuse("UPDATE ON outbox_delivery", "OLD.ordering_key = 'bad'")
	j := newKeys(t, db)
	told := 0
	j.Failed = func(string, error) { told++ }
	j.Add(key("good"), lane.Live)
	j.Add(key("bad"), lane.Live)
	complete := relaytest.Row[time.Time](db, `SELECT now()`)
	for range 3 { // and is not tried all the time
		j.Agenda.Take(time.Now())
		relaytest.Must(t, j.Run(t.Context(), complete))
		j.Add(key("bad"), lane.Live)
	}
	testkit.Equal(t, "ready", ready(j), []string{"good"})
	testkit.Equal(t, "told", told, 1)
	db.Exec(`DROP TRIGGER refuse ON outbox_delivery`)
	of := j.keys[key("bad")]
	of.again = time.Time{}
	j.keys[key("bad")] = of
	relaytest.Must(t, j.Run(t.Context(), complete))
	testkit.Equal(t, "ready then", ready(j), []string{"bad"})
}

// Of very many keys the others are found again by scans.
func TestKeysAreBounded(t *testing.T) {
	t.Parallel()
	j := &Keys{Agenda: &agenda.Agenda{}}
	for i := range 2 * lane.MaxReady {
		j.Add(key(time.Duration(i).String()), lane.Live)
	}
	testkit.Equal(t, "keys are noted", len(j.keys), lane.MaxReady)
}
