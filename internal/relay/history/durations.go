package history

import (
	"math"
	"time"
)

// buckets is how many a histogram has at most. Their upper bounds grow by half from 0.5 ms to about
// 5 hours.
const buckets = 44

// Durations is a histogram: how many durations lie in each bucket, up to the last that has any.
// Histograms can be added.
type Durations []int32

// bound returns the upper end of a bucket in seconds.
func bound(i int) float64 { return 0.0005 * math.Pow(1.5, float64(i)) }

// note counts a duration, without a search for its bucket.
func (d *Durations) note(took time.Duration) {
	steps := math.Ceil(math.Log(took.Seconds()/bound(0)) / math.Log(1.5)) // minus infinity of 0
	bucket := int(max(0, min(steps, buckets-1)))
	d.grow(bucket + 1)
	(*d)[bucket]++
}

func (d *Durations) grow(to int) {
	for len(*d) < to {
		*d = append(*d, 0)
	}
}

func (d *Durations) add(other Durations) {
	d.grow(len(other))
	for i, n := range other {
		(*d)[i] += n
	}
}

// Quantile returns the value below which the share of all lies, in seconds; nil if there are none.
func (d Durations) Quantile(share float64) *float64 {
	all := 0.0
	for _, n := range d {
		all += float64(n)
	}
	want, seen := share*all, 0.0
	for i, n := range d {
		if seen += float64(n); n > 0 && seen >= want {
			lower := 0.0
			if i > 0 {
				lower = bound(i - 1)
			}
			value := lower + (bound(i)-lower)*(1-(seen-want)/float64(n))
			return &value
		}
	}
	return nil
}
