package relay

import (
	"bytes"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/robfig/cron/v3"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/relay/archive"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// fakeClock is the clock of a backoff: it moves by what the backoff says to wait.
type fakeClock struct{ now time.Time }

func (c *fakeClock) Now() time.Time { return c.now }

// The library gives up after 15 minutes by default, and the relay would stay dead after an outage.
func TestBackoffNeverGivesUp(t *testing.T) {
	t.Parallel()
	clock := &fakeClock{time.Unix(1_000_000, 0)}
	b := newBackoff()
	b.Clock = clock
	b.Reset()
	began := clock.now
	for clock.now.Sub(began) < 48*time.Hour {
		wait := b.NextBackOff()
		if wait == backoff.Stop || wait <= 0 || wait > 10*time.Second {
			t.Fatalf("after %s: %s", clock.now.Sub(began), wait)
		}
		clock.now = clock.now.Add(wait)
	}
	b.Reset()
	if wait := b.NextBackOff(); wait > 100*time.Millisecond {
		t.Errorf("after success the first wait is %s", wait)
	}
}

// Cron neither recovers panics by itself nor keeps a slow job from piling up.
func TestJobThatPanicsOrHangsHurtsNobody(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	var log safeBuffer
	cfg := db.config(to("http://receiver.test/"))
	cfg.Log = zerolog.New(&log)
	r := prepared(t, cfg)
	var panics, others atomic.Int64
	var hanging, most atomic.Int64
	release := make(chan struct{})
	done := make(chan struct{})
	jobs := newJobs(r.cfg.Log)
	add := func(job func()) { jobs.Schedule(everyMoment{}, cron.FuncJob(job)) }
	add(func() { panics.Add(1); panic("a defect") })
	add(func() {
		most.Store(max(most.Load(), hanging.Add(1)))
		<-release
		hanging.Add(-1)
	})
	add(func() {
		if others.Add(1) == 20 {
			close(done)
		}
	})
	jobs.Start()
	within(t, "twenty runs of the healthy job", done)
	close(release)
	within(t, "the end of the jobs", jobs.Stop().Done())
	if panics.Load() < 2 || most.Load() != 1 {
		t.Errorf("%d panics, the slow job ran %d times at once", panics.Load(), most.Load())
	}
	if !strings.Contains(log.String(), "a defect") {
		t.Error("the panic is not logged")
	}
	if jobs.Location() != time.UTC {
		t.Errorf("jobs run in %s, where hours are skipped and repeated", jobs.Location())
	}
}

// everyMoment is a schedule that is due again at once.
type everyMoment struct{}

func (everyMoment) Next(now time.Time) time.Time { return now.Add(time.Millisecond) }

// safeBuffer is a buffer that several goroutines may write to.
type safeBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buffer.String()
}

// Parked deliveries are those of events without a route; a route that comes later releases them.
func TestParkedDeliveriesAreReleasedByALaterRoute(t *testing.T) {
	t.Parallel()
	db := newDatabase(t, "default")
	db.exec(`DELETE FROM outbox_route`)
	const parked = 3001 // more than three steps of the search
	db.insert(parked, "early")
	db.exec(`INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('other', '{}', 'other')`)
	rc := newReceiver(t, nil)
	cfg := db.config(to(rc.URL))
	cfg.Routes = []Route{{Event: "t", To: []string{"default"}}}
	r := start(t, cfg)
	r.settles(t, policy.Delivered, parked)
	if got := row[string](db, `SELECT string_agg(destination || '/' || status, ',') FROM outbox_delivery WHERE status = 'pending'`); got != "/pending" {
		t.Errorf("left are %q, want one parked", got)
	}
}

// A producer's transaction that began before a route was added parks its event; what is parked is looked through long before
// it commits, up to later events.
func TestLateCommitOfAParkedEventIsReleased(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.exec(`DELETE FROM outbox_route`)
	late := db.plain().Begin()
	_, err := late.Exec(t.Context(), `INSERT INTO outbox (event_type, payload, idempotency_key) VALUES ('t', '{}', 'late')`)
	must(t, err)
	db.insert(3, "parked")
	rc := newReceiver(t, nil)
	r := start(t, db.config(to(rc.URL))) // which adds the route
	r.settles(t, policy.Delivered, 3)
	latest := row[int64](db, `SELECT max(id) FROM outbox`)
	becomes(db, latest, `SELECT parked_after FROM outbox_destination`)
	must(t, late.Commit(t.Context()))
	r.settles(t, policy.Delivered, 4)
	becomes(db, 0, `SELECT count(parked_after) FROM outbox_destination`)
}

// A relay archives by its schedule, and says so.
func TestRelayArchives(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	db.plain().InsertOld(3, "key")
	archived := make(chan archive.Result, 100)
	cfg := db.config(to("http://receiver.test/"))
	cfg.Retention = archive.Retention{ArchiveAfter: 30 * days}
	cfg.Hooks.Archived = func(batch archive.Result) { archived <- batch }
	r := prepared(t, cfg)
	r.cfg.Hooks.Archived = cfg.Hooks.Archived
	often := *r.config()
	often.Retention.Schedule = "@every 1s" // more often than is allowed
	r.effective.Store(&often)
	r.begin()
	select {
	case batch := <-archived:
		if batch.Events != 3 {
			t.Errorf("archived %+v", batch)
		}
	case <-time.After(patience):
		t.Error("nothing was archived")
	}
}
