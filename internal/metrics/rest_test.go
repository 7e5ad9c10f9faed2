package metrics

import (
	"context"
	"testing"
	"time"
)

// A database that hung during one sample is sampled again long before its gauges are left out, and a slow one as rarely as ever.
func TestOneFailedSampleLosesNoGauge(t *testing.T) {
	t.Parallel()
	const hung = restFactor * sampleTimeout
	if rest := sampleRest(sampleInterval, hung, context.DeadlineExceeded); rest+sampleTimeout+sampleInterval > staleSample {
		t.Errorf("the next sample begins %s after one that failed; gauges last %s", rest, staleSample)
	}
	if rest := sampleRest(sampleInterval, hung, nil); rest != hung {
		t.Errorf("a slow sample is followed by %s, want %s", rest, hung)
	}
	if rest := sampleRest(sampleInterval, time.Millisecond, context.DeadlineExceeded); rest != sampleInterval {
		t.Errorf("a quick failure is followed by %s, want %s", rest, sampleInterval)
	}
}
