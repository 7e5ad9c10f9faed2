package metrics

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/alert"
	"github.com/outbox-relay/outbox-relay/relay"
)

const (
	// turnMargin is how much longer than its poll interval the claimer may be without a turn: a
	// statement may take as long as its timeout, and a claim may need several after damaged data
	// was met.
	turnMargin = 3 * pg.StatementTimeout
	// beatMargin is how old a heartbeat may become: a relay sends one every 1 to 4.5 seconds.
	beatMargin = 10 * time.Second
	// asleepMargin is the same of a relay that is asleep, see [session.AsleepInterval].
	asleepMargin = 60 * time.Second
)

// health remembers what the relay's state does not say.
type health struct {
	quarantined atomic.Bool
	stopping    atomic.Pointer[func() bool]

	mu       sync.Mutex
	failedAt time.Time // the last failed statement
	hint     string    // what to do about it
}

// failed remembers the hint for an error, and nothing else of it: an error may name hosts and
// users.
func (h *health) failed(now time.Time, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failedAt, h.hint = now, pg.Hint(err)
}

func (h *health) lastFailure() (at time.Time, hint string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.failedAt, h.hint
}

// StopsWhen makes /readyz say that the relay stops from when on the function returns true.
func (m *Metrics) StopsWhen(stopping func() bool) { m.health.stopping.Store(&stopping) }

func (h *health) isStopping() bool {
	stopping := h.stopping.Load()
	return stopping != nil && (*stopping)()
}

// A Health is the answer of /healthz and /readyz.
type Health struct {
	// Status is ok or failing.
	Status string `json:"status"`
	// Reasons say what is wrong and what to do about it. Empty: nothing is.
	Reasons []string `json:"reasons"`
}

func newHealth(reasons []string) Health {
	if len(reasons) > 0 {
		return Health{"failing", reasons}
	}
	return Health{"ok", []string{}}
}

// live returns what is wrong with the process, so that a restart helps: the claimer does not turn.
// A database that is away is no reason, since the relay waits for it.
func (m *Metrics) live(now time.Time, s relay.State) (reasons []string) {
	if m.health.isStopping() || s.Turned.IsZero() {
		return nil
	}
	if silent := now.Sub(s.Turned); silent > m.cfg.PollInterval+turnMargin {
		return []string{fmt.Sprintf("the claimer has not begun a turn for %s; restart the relay and report this as a defect", plain.Span(silent))}
	}
	return nil
}

// ready returns why the relay does not deliver.
func (m *Metrics) ready(now time.Time, s relay.State) (reasons []string) {
	reasons = m.live(now, s)
	at, hint := m.health.lastFailure()
	switch {
	case m.health.isStopping():
		return []string{"the relay is stopping"}
	case m.health.quarantined.Load():
		return append(reasons, "quarantined: this is not the database that relays were accepted on; run outbox-relay identity show")
	case s.Asleep && now.Sub(s.Beat) <= asleepMargin:
		return reasons
	case s.Registered && now.Sub(s.Beat) <= beatMargin && (s.StuckSince.IsZero() || now.Sub(s.StuckSince) < alert.StuckAfter):
		return reasons
	case s.Registered && now.Sub(s.Beat) <= beatMargin:
		reasons = append(reasons, fmt.Sprintf("every claim has failed for %s; the log says why", plain.Span(now.Sub(s.StuckSince))))
	case s.Registered:
		reasons = append(reasons, fmt.Sprintf("the database has taken no heartbeat for %s", plain.Span(now.Sub(s.Beat))))
	case s.Beat.IsZero() && at.IsZero():
		reasons = append(reasons, "the relay is starting: it is not registered in its database yet")
	case hint != "" && now.Sub(at) < time.Minute:
		return append(reasons, "the relay cannot use its database, and tries again by itself: "+hint)
	default:
		reasons = append(reasons, "the relay is not registered in its database; it tries again by itself, and its log says why")
	}
	if hint != "" && now.Sub(at) < time.Minute {
		reasons = append(reasons, hint)
	}
	return reasons
}

// Handler returns what serves /metrics, /healthz and /readyz.
func (m *Metrics) Handler() http.Handler {
	return handler(m.registry, m.cfg.Allows, m.sampler.scraped,
		func(now time.Time) []string { return m.live(now, m.state()) }, func(now time.Time) []string { return m.ready(now, m.state()) })
}

// handler serves a registry, and what live and ready say is wrong. scraped is called before the
// registry is read.
func handler(registry prometheus.Gatherer, allows func(string) bool, scraped func(context.Context), live, ready func(time.Time) []string) http.Handler {
	mux := http.NewServeMux()
	scrape := newScrapes().bounded(promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		// Compression would cost each relay more memory than it saves on a line within a cluster.
		ErrorHandling: promhttp.ContinueOnError, DisableCompression: true,
	}))
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		if allows != nil && !allows(r.Host) {
			http.Error(w, "This host name is not allowed: a foreign site could point its own name here. Add the name under which you reach this server to admin.allowed_hosts.",
				http.StatusMisdirectedRequest)
			return
		}
		scraped(r.Context())
		scrape.ServeHTTP(w, r)
	})
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, newHealth(live(time.Now()))) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answer(w, newHealth(ready(time.Now()))) })
	return mux
}

func answer(w http.ResponseWriter, h Health) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if h.Status != "ok" {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(h)
}
