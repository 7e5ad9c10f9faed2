package metrics

import (
	"context"
	"net/http"
	"slices"
	"sync"
	"time"
)

const (
	// mostScrapes are answered at once: each takes memory for all series.
	mostScrapes = 4
	// scrapeWait is how long a scrape waits for others before the oldest of them gives way.
	scrapeWait = time.Second
)

// scrapes bounds how many requests are answered at once. Others wait. For each that has waited long
// enough the oldest answer ends, so that whoever takes no answers keeps no scraper from one. It is
// safe for concurrent use.
type scrapes struct {
	slots chan struct{} // full: mostScrapes are answered

	mu      sync.Mutex
	answers []*http.ResponseController // the oldest first
}

func newScrapes() *scrapes { return &scrapes{slots: make(chan struct{}, mostScrapes)} }

// bounded returns a handler that calls next within the bound.
func (s *scrapes) bounded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !s.enter(r.Context()) {
			return
		}
		answer := http.NewResponseController(w)
		s.mu.Lock()
		s.answers = append(s.answers, answer)
		s.mu.Unlock()
		defer func() {
			s.mu.Lock()
			if at := slices.Index(s.answers, answer); at >= 0 {
				s.answers = slices.Delete(s.answers, at, at+1)
			}
			s.mu.Unlock()
			<-s.slots
		}()
		next.ServeHTTP(w, r)
	})
}

// enter waits for a slot. It reports false when ctx ends first.
func (s *scrapes) enter(ctx context.Context) bool {
	select {
	case s.slots <- struct{}{}: // without a timer
		return true
	default:
	}
	patience := time.NewTicker(scrapeWait)
	defer patience.Stop()
	for {
		select {
		case s.slots <- struct{}{}:
			return true
		case <-ctx.Done():
			return false
		case <-patience.C:
			s.endOldest()
		}
	}
}

// endOldest makes the oldest answer's Write fail. The lock keeps it from being the connection's
// next answer.
func (s *scrapes) endOldest() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.answers) > 0 {
		_ = s.answers[0].SetWriteDeadline(time.Unix(1, 0))
		s.answers = slices.Delete(s.answers, 0, 1)
	}
}
