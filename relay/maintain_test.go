package relay

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/robfig/cron/v3"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/relay/archive"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
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
	db := relaytest.Covered(t)
	var log relaytest.Buffer
	cfg := config(db, to("http://receiver.test/"))
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
	testkit.Contains(t, "the panic is not logged", log.String(), "a defect")
	if jobs.Location() != time.UTC {
		t.Errorf("jobs run in %s, where hours are skipped and repeated", jobs.Location())
	}
}

// everyMoment is a schedule that is due again at once.
type everyMoment struct{}

func (everyMoment) Next(now time.Time) time.Time { return now.Add(time.Millisecond) }

// A relay archives by its schedule, and says so.
func TestRelayArchives(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	db.InsertOld(3, "key")
	archived := make(chan archive.Result, 100)
	cfg := config(db, to("http://receiver.test/"))
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
	case <-time.After(relaytest.Patience):
		t.Error("nothing was archived")
	}
}
