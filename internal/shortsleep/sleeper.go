package shortsleep

import "time"

// Longest is the longest sleep for which a [Sleeper] is of use: longer ones are as exact by a timer
// of Go.
const Longest = time.Millisecond

// A Sleeper is for one goroutine. It holds a file descriptor until Close.
type Sleeper struct{ clock }

// New returns a Sleeper. On systems without such a clock, and where the kernel refuses one, it
// sleeps by a timer of Go.
func New() *Sleeper { return &Sleeper{newClock()} }

// Sleep sleeps for at least d, which must be positive. Nothing ends it sooner.
func (s *Sleeper) Sleep(d time.Duration) {
	if !s.sleep(d) {
		time.Sleep(d)
	}
}

// Close gives the file descriptor back. After it Sleep works by a timer of Go.
func (s *Sleeper) Close() { s.close() }
