package metrics

import (
	"context"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A database that hung during one sample is sampled again long before its gauges are left out, and a slow one as rarely as ever.
func TestOneFailedSampleLosesNoGauge(t *testing.T) {
	t.Parallel()
	const hung = restFactor * sampleTimeout
	if rest := sampleRest(sampleInterval, hung, context.DeadlineExceeded); rest+sampleTimeout+sampleInterval > staleSample {
		t.Errorf("the next sample begins %s after one that failed; gauges last %s", rest, staleSample)
	}
	testkit.Equal(t, "a slow sample is followed by", sampleRest(sampleInterval, hung, nil), hung)
	testkit.Equal(t, "a quick failure is followed by", sampleRest(sampleInterval, time.Millisecond, context.DeadlineExceeded), sampleInterval)
}
