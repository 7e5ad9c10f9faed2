package run

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/admin"
	"github.com/outbox-relay/outbox-relay/internal/admin/api"
	"github.com/outbox-relay/outbox-relay/internal/admin/control"
	"github.com/outbox-relay/outbox-relay/internal/admin/guard"
	"github.com/outbox-relay/outbox-relay/internal/admin/page"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
	"github.com/outbox-relay/outbox-relay/relay"
)

const (
	// consoleTimeout bounds the questions that one request asks the database.
	consoleTimeout = 8 * time.Second
	// consoleConnections are for those who look, and for two operations that run.
	consoleConnections = 5
)

// A console serves the API and the page beside the relay. Without a server it is off, and costs the relay nothing.
type console struct {
	server  *admin.Server
	pool    *pgxpool.Pool
	control *control.Control
	handler http.Handler
	targets *atomic.Pointer[map[string]string]
}

// openConsole opens admin.listen. The database is reached with the first request.
func openConsole(ctx context.Context, c *config.Config, version string) (s console, err error) {
	listener := admin.Listener{
		Setting: "admin.listen", Address: c.Admin.Listen, Configured: c.Given("admin.listen"), WriteTimeout: metricsWriteTimeout, Log: c.Log,
	}
	if current := c.Admin.Certificate; current != nil {
		listener.TLS = &tls.Config{
			MinVersion:     tls.VersionTLS12,
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return current(), nil },
		}
	}
	if s.server, err = admin.Listen(ctx, listener); s.server == nil {
		return s, err
	}
	if err := s.build(ctx, c, version); err != nil {
		s.server.Close()
		return console{}, err
	}
	return s, nil
}

func (s *console) build(ctx context.Context, c *config.Config, version string) error {
	cfg := c.PoolConfig(consoleConnections)
	cfg.ConnConfig.ConnectTimeout = min(cfg.ConnConfig.ConnectTimeout, 3*time.Second)
	cfg.MaxConnIdleTime = 30 * time.Second
	pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), cfg)
	if err != nil {
		return fmt.Errorf("open database for admin.listen: %w", err)
	}
	s.pool = pool
	s.targets = new(atomic.Pointer[map[string]string])
	s.reloaded(c)
	s.control = control.New(control.Config{
		Outbox: ops.New(pool), Environment: c.Relay.Environment, ReceiverMemory: c.Relay.Retention.ProcessedEvents, History: c.Relay.History, Log: c.Log,
	})
	s.handler = lazily(func() (http.Handler, error) { return s.handlerOf(c, version) })
	return nil
}

// handlerOf makes the API and the page, behind the guard.
func (s *console) handlerOf(c *config.Config, version string) (http.Handler, error) {
	dashboard, err := page.New(page.Config{
		Control: s.control, Prefix: c.Admin.PathPrefix, Relay: c.Relay.Name, Version: version, Database: c.DatabaseName(), Log: c.Log,
		Targets: func() map[string]string { return *s.targets.Load() },
	})
	if err != nil {
		return nil, fmt.Errorf("build the page: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("/api/", api.New(s.control, version, c.Log))
	mux.Handle("/", dashboard.Handler())
	prefix := c.Admin.PathPrefix
	return c.Guard().Handler(below(prefix, bounded(mux), dashboard.Refuse), func(w http.ResponseWriter, r *http.Request, status int, title, detail string) {
		refuse := dashboard.Refuse
		if strings.HasPrefix(strings.TrimPrefix(r.URL.Path, prefix), "/api/") {
			refuse = api.Refuse
		}
		refuse(w, r, status, title, detail)
	}), nil
}

// lazily makes a handler at the first request: templates cost megabytes that a relay without a reader does not have to hold.
func lazily(build func() (http.Handler, error)) http.Handler {
	built := sync.OnceValues(build)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler, err := built()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		handler.ServeHTTP(w, r)
	})
}

// below serves a handler under a prefix, and sends the prefix itself to the first page.
func below(prefix string, next http.Handler, refuse guard.Refusal) http.Handler {
	if prefix == "" {
		return next
	}
	inner := http.StripPrefix(prefix, next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == prefix:
			http.Redirect(w, r, prefix+"/", http.StatusSeeOther)
		// What is not in its shortest form is refused: the mux would redirect it, without the prefix, to what others serve beside it.
		case strings.HasPrefix(r.URL.Path, prefix+"/") && strings.TrimSuffix(r.URL.Path, "/") == path.Clean(r.URL.Path):
			inner.ServeHTTP(w, r)
		default:
			refuse(w, r, http.StatusNotFound, "There is nothing here", "The page lies below "+prefix+"/ (admin.path_prefix).")
		}
	})
}

// bounded ends a request that asks the database too much.
func bounded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), consoleTimeout)
		defer cancel()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// hooks returns hooks that note what the relay does, and call next.
func (s *console) hooks(next relay.Hooks) relay.Hooks {
	if s.server == nil {
		return next
	}
	return s.control.Hooks(next)
}

// reloaded takes over what the page shows of a configuration: URLs, without what may be secret.
func (s *console) reloaded(c *config.Config) {
	if s.server == nil {
		return
	}
	targets := map[string]string{}
	for _, d := range c.Relay.Destinations {
		targets[d.Name] = config.WithoutSecrets(d.URL)
	}
	s.targets.Store(&targets)
}

// close gives up a console that does not start.
func (s *console) close() {
	if s.server != nil {
		s.server.Close()
		s.pool.Close()
	}
}

// start serves until end is called. Operations that run then are interrupted between two batches.
func (s *console) start(stopping context.Context, r *relay.Relay) (end func()) {
	if s.server == nil {
		return func() {}
	}
	s.control.Follow(r.State)
	ctx, cancel := context.WithCancel(context.WithoutCancel(stopping))
	var running sync.WaitGroup
	running.Go(func() { s.control.Run(ctx) })
	running.Go(func() { s.server.Run(ctx, s.handler) })
	return func() {
		cancel()
		running.Wait()
		s.pool.Close()
	}
}
