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

// A console serves the API and the page beside the relay. Without a server it is off, and costs the
// relay nothing.
type console struct {
	server *admin.Server
	*site
	handler http.Handler
}

// openConsole opens admin.listen. The database is reached with the first request.
func openConsole(ctx context.Context, c *config.Config, version string) (s console, err error) {
	if s.server, err = listenForConsole(ctx, c); s.server == nil {
		return s, err
	}
	if s.site, err = newSite(ctx, c); err != nil {
		s.server.Close()
		return console{}, err
	}
	s.handler = lazily(func() (http.Handler, error) {
		dashboard, handler, err := s.site.serve(page.Config{Prefix: c.Admin.PathPrefix}, c, version)
		if err != nil {
			return nil, err
		}
		return guarded(c, handler, dashboard), nil
	})
	return s, nil
}

func listenForConsole(ctx context.Context, c *config.Config) (*admin.Server, error) {
	listener := admin.Listener{
		Setting: "admin.listen", Address: c.Admin.Listen, Configured: c.Given("admin.listen"), WriteTimeout: metricsWriteTimeout, Log: c.Log,
	}
	if current := c.Admin.Certificate; current != nil {
		listener.TLS = &tls.Config{
			MinVersion:     tls.VersionTLS12,
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return current(), nil },
		}
	}
	return admin.Listen(ctx, listener)
}

// A site is the API and the page of one outbox.
type site struct {
	pool    *pgxpool.Pool
	control *control.Control
	targets atomic.Pointer[map[string]string]
}

func newSite(ctx context.Context, c *config.Config) (*site, error) {
	cfg := c.PoolConfig(consoleConnections)
	cfg.ConnConfig.ConnectTimeout = min(cfg.ConnConfig.ConnectTimeout, 3*time.Second)
	cfg.MaxConnIdleTime = 30 * time.Second
	pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), cfg)
	if err != nil {
		return nil, fmt.Errorf("open database for admin.listen: %w", err)
	}
	s := &site{pool: pool, control: control.New(control.Config{
		Outbox: ops.New(pool), Environment: c.Relay.Environment, ReceiverMemory: c.Relay.Retention.ProcessedEvents, History: c.Relay.History, Log: c.Log,
	})}
	s.reloaded(c)
	return s, nil
}

// serve makes the API and the page. at says where it lies.
func (s *site) serve(at page.Config, c *config.Config, version string) (*page.Page, http.Handler, error) {
	at.Control, at.Relay, at.Version, at.Database, at.Log = s.control, c.Relay.Name, version, c.DatabaseName(), c.Log
	at.Targets = func() map[string]string { return *s.targets.Load() }
	dashboard, err := page.New(at)
	if err != nil {
		return nil, nil, fmt.Errorf("build the page: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("/api/", api.New(s.control, version, c.Log))
	mux.Handle("/", dashboard.Handler())
	return dashboard, mux, nil
}

// guarded serves what lies below admin.path_prefix to those who may see it. The page shows
// refusals.
func guarded(c *config.Config, handler http.Handler, shown *page.Page) http.Handler {
	prefix := c.Admin.PathPrefix
	return c.Guard().Handler(below(prefix, bounded(handler), shown.Refuse), refusing(prefix, shown))
}

// refusing returns what refuses a request as JSON to a program, and as a page to a person.
func refusing(prefix string, shown *page.Page) guard.Refusal {
	return func(w http.ResponseWriter, r *http.Request, status int, title, detail string) {
		refuse := shown.Refuse
		if ofAPI(strings.TrimPrefix(r.URL.Path, prefix)) {
			refuse = api.Refuse
		}
		refuse(w, r, status, title, detail)
	}
}

// ofAPI reports whether a path leads to the API, also to that of one of several databases.
func ofAPI(path string) bool {
	if _, rest, found := strings.Cut(strings.TrimPrefix(path, databasesPath), "/"); found && strings.HasPrefix(path, databasesPath) {
		path = "/" + rest
	}
	return strings.HasPrefix(path, "/api/")
}

// lazily makes a handler at the first request: templates cost megabytes that a relay without a
// reader does not have to hold.
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
		// What is not in its shortest form is refused: the mux would redirect it, without the
		// prefix, to what others serve beside it.
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
func (s *site) reloaded(c *config.Config) {
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
