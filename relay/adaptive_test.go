package relay

import (
	"net/http"
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/outbox-relay/outbox-relay/relay/post"
)

// BenchmarkAdaptive sends to a receiver that takes 50 requests a second and answers 429 to more, and reports, for the
// time after the lane has had some to find that out, how many a second it took, and which share it refused. Half a
// minute of each with -full.
func BenchmarkAdaptive(b *testing.B) {
	const perSecond = 50
	settling, measured := 5*time.Second, 2*time.Second
	if *full {
		settling, measured = 30*time.Second, 30*time.Second
	}
	var took, refused int
	for b.Loop() {
		db := newDatabase(b)
		var mu sync.Mutex
		limit := rate.NewLimiter(perSecond, 10)
		counting := false
		rc := newReceiver(b, func(w http.ResponseWriter, _ request) {
			mu.Lock()
			defer mu.Unlock()
			ok := limit.AllowN(time.Now(), 1)
			switch {
			case !counting:
			case ok:
				took++
			default:
				refused++
			}
			if !ok {
				w.WriteHeader(http.StatusTooManyRequests)
			}
		})
		db.insert(2*perSecond*int((settling+measured).Seconds()), "key")
		r := start(b, db.config(post.Destination{Name: "default", URL: rc.URL}))
		<-time.After(settling)
		mu.Lock()
		counting = true
		mu.Unlock()
		<-time.After(measured)
		mu.Lock()
		counting = false
		mu.Unlock()
		r.stop()
	}
	b.ReportMetric(float64(took)/measured.Seconds()/float64(b.N), "accepted/s")
	b.ReportMetric(100*float64(refused)/float64(took+refused), "%refused")
	b.ReportMetric(0, "ns/op")
}
