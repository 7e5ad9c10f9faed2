package policy

import (
	"math/rand/v2"
	"net/http"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func retryPolicy(jitter float64, schedule ...time.Duration) RetryPolicy {
	return RetryPolicy{Schedule: schedule, MaxAttempts: DefaultMaxAttempts, Jitter: &jitter, RetryAfterMax: DefaultRetryAfterMax}
}

func TestDelayFollowsTheScheduleAndTheLastRepeats(t *testing.T) {
	t.Parallel()
	p := retryPolicy(0.1, DefaultSchedule()...)
	want := []time.Duration{
		5 * time.Second, 30 * time.Second, 5 * time.Minute, 30 * time.Minute, 4 * time.Hour, 4 * time.Hour, 4 * time.Hour,
	}
	for i, d := range want {
		if got := p.DelayAfter(i+1, 0, 0); got != d {
			t.Errorf("after attempt %d: %s, want %s", i+1, got, d)
		}
	}
	for attempt, want := range map[int]time.Duration{-1: 5 * time.Second, 0: 5 * time.Second, 1000: 4 * time.Hour} {
		if got := p.DelayAfter(attempt, 0, 0); got != want {
			t.Errorf("after attempt %d: %s, want %s", attempt, got, want)
		}
	}
}

// Never before its time, never more than the jitter after it, unless the receiver asked for more.
func TestDelayIsNeverEarlyAndBoundedAbove(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		duration := func(label string, least time.Duration) time.Duration {
			return time.Duration(rapid.Int64Range(int64(least), int64(maxDelay)).Draw(t, label))
		}
		schedule := make([]time.Duration, rapid.IntRange(1, 10).Draw(t, "entries"))
		for i := range schedule {
			schedule[i] = duration("entry", 1)
		}
		jitter := rapid.Float64Range(0, 1).Draw(t, "jitter")
		fraction := rapid.Float64Range(0, 0.999999).Draw(t, "fraction")
		asked := duration("retry after", 0)
		p := retryPolicy(jitter, schedule...)
		p.RetryAfterMax = duration("retry_after_max", 1)
		attempt := rapid.IntRange(1, 1000).Draw(t, "attempt")

		scheduled := schedule[min(attempt, len(schedule))-1]
		latest := max(scheduled+time.Duration(float64(scheduled)*jitter), min(asked, p.RetryAfterMax))
		got := p.DelayAfter(attempt, fraction, asked)
		if got < scheduled || got > latest {
			t.Fatalf("%s is outside of [%s, %s]", got, scheduled, latest)
		}
		if got < min(asked, p.RetryAfterMax) {
			t.Fatalf("%s is before what the receiver asked for: %s of at most %s", got, asked, p.RetryAfterMax)
		}
		if without := p.DelayAfter(attempt, fraction, 0); got < without {
			t.Fatalf("Retry-After made it shorter: %s instead of %s", got, without)
		}
	})
}

func TestDefaultJitterLengthensByAtMostATenth(t *testing.T) {
	t.Parallel()
	p := RetryPolicy{}.WithDefaults()
	for attempt, scheduled := range p.Schedule {
		for range 1000 {
			got := p.DelayAfter(attempt+1, rand.Float64(), 0)
			if got < scheduled || got > scheduled+scheduled/10 {
				t.Fatalf("%s is outside of [%s, %s]", got, scheduled, scheduled+scheduled/10)
			}
		}
	}
}

func TestParseRetryAfter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		values []string
		want   time.Duration
	}{
		{nil, 0},
		{[]string{""}, 0},
		{[]string{"0"}, 0},
		{[]string{"1"}, time.Second},
		{[]string{" 120 "}, 2 * time.Minute},
		{[]string{"007"}, 7 * time.Second},
		{[]string{"-5"}, 0},
		{[]string{"+5"}, 0},
		{[]string{"1e9"}, 0},
		{[]string{"1.5"}, 0},
		{[]string{"0x10"}, 0},
		{[]string{"1_000"}, 0},
		{[]string{"5s"}, 0},
		{[]string{"5, 7"}, 0},
		{[]string{"soon"}, 0},
		{[]string{"∞"}, 0},
		{[]string{"1000000000"}, maxDelay},
		{[]string{"9223372036854775807"}, maxDelay},
		{[]string{"18446744073709551616"}, maxDelay},
		{[]string{"1000000000000000000000000000000"}, maxDelay}, // 10^30
		{[]string{"Sun, 01 Mar 2026 12:00:30 GMT"}, 30 * time.Second},
		{[]string{"Sunday, 01-Mar-26 12:00:30 GMT"}, 30 * time.Second}, // RFC 850
		{[]string{"Sun Mar  1 12:00:30 2026"}, 30 * time.Second},       // asctime
		{[]string{"Sun, 01 Mar 2026 11:00:00 GMT"}, 0},
		{[]string{"Thu, 01 Jan 1970 00:00:00 GMT"}, 0},
		{[]string{"Fri, 31 Dec 9999 23:59:59 GMT"}, maxDelay},
		{[]string{"Sun, 32 Mar 2026 12:00:30 GMT"}, 0},
		{[]string{"2026-03-01T12:00:30Z"}, 0},
		{[]string{"7", "9"}, 7 * time.Second},
		{[]string{"junk", "9"}, 0},
	} {
		if got := parseRetryAfter(http.Header{"Retry-After": c.values}, now); got != c.want {
			t.Errorf("%q: %s, want %s", c.values, got, c.want)
		}
	}
}

func FuzzParseRetryAfter(f *testing.F) {
	for _, seed := range []string{
		"", "0", "-5", "120", "1e9", "1000000000000000000000000000000", "Sun, 01 Mar 2026 12:00:30 GMT",
		"Sunday, 01-Mar-26 12:00:30 GMT", "Sun Mar  1 12:00:30 2026", "Fri, 31 Dec 9999 23:59:59 GMT", "\x00", "٣",
	} {
		f.Add(seed)
	}
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	f.Fuzz(func(t *testing.T, value string) {
		if got := parseRetryAfter(http.Header{"Retry-After": {value}}, now); got < 0 || got > maxDelay {
			t.Errorf("%q: %s", value, got)
		}
	})
}
