package metrics

import (
	"context"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/watch"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A database that hung during one sample is sampled again long before its gauges are left out, and
// a slow one as rarely as ever.
func TestOneFailedSampleLosesNoGauge(t *testing.T) {
	t.Parallel()
	const hung = restFactor * sampleTimeout
	if rest := sampleRest(sampleInterval, hung, context.DeadlineExceeded); rest+sampleTimeout+sampleInterval > staleSample {
		t.Errorf("the next sample begins %s after one that failed; gauges last %s", rest, staleSample)
	}
	testkit.Equal(t, "a slow sample is followed by", sampleRest(sampleInterval, hung, nil), hung)
	testkit.Equal(t, "a quick failure is followed by", sampleRest(sampleInterval, time.Millisecond, context.DeadlineExceeded), sampleInterval)
}

// Nothing waits in an outbox that is asleep, whatever the last sample saw; what has failed is as it
// was.
func TestSampleOfASleeper(t *testing.T) {
	t.Parallel()
	s, now := newSampler(), time.Now()
	s.renew(now)
	if _, recent := s.recent(now); recent {
		t.Error("there was no sample")
	}
	seen := watch.LaneBacklog{Pending: 1, Waiting: 2, BlockedKeys: 3, LagSeconds: 4, Failed: 5}
	s.keep(sample{backlog: watch.Backlog{Lanes: []watch.LaneBacklog{seen}, Parked: 6, Untaken: 7, Unserved: 8}, at: now.Add(-time.Hour)})
	s.renew(now)
	got, recent := s.recent(now)
	if b := got.backlog; !recent || b.Parked+b.Untaken+b.Unserved != 0 || b.Lanes[0] != (watch.LaneBacklog{Failed: 5}) {
		t.Errorf("recent %t: %+v", recent, b)
	}
}
