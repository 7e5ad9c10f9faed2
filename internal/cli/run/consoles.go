package run

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/outbox-relay/outbox-relay/internal/admin"
	"github.com/outbox-relay/outbox-relay/internal/admin/page"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/relay"
)

// databasesPath is below what each of several databases has its page and API.
const databasesPath = "/databases/"

// consoles serve the API and the page of each of several outboxes, and an index of them. Without a
// server they are off.
type consoles struct {
	server  *admin.Server
	c       *config.Config // of the start: of the guard, and of what a page says of this process
	version string

	mu      sync.Mutex
	sites   []*namedSite    // by name
	ctx     context.Context // of what runs beside sites; nil: nothing runs yet
	running sync.WaitGroup
}

// A namedSite is one of consoles.
type namedSite struct {
	*site
	name    string
	handler http.Handler
	state   func() relay.State // nil: no relay was made yet
	end     context.CancelFunc
}

func openConsoles(ctx context.Context, c *config.Config, version string) (all *consoles, err error) {
	all = &consoles{c: c, version: version}
	all.server, err = listenForConsole(ctx, c)
	return all, err
}

// add makes the site of an outbox, in place of one of the same name. Call it only with a server.
func (all *consoles) add(ctx context.Context, c *config.Config, name string) (*namedSite, error) {
	made, err := newSite(ctx, c)
	if err != nil {
		return nil, err
	}
	prefix := all.c.Admin.PathPrefix
	s := &namedSite{site: made, name: name, end: func() {}}
	s.handler = http.StripPrefix(databasesPath+name, lazily(func() (http.Handler, error) {
		_, handler, err := made.serve(page.Config{Prefix: prefix + databasesPath + name, Home: prefix + "/", Of: name}, c, all.version)
		return handler, err
	}))
	all.mu.Lock()
	defer all.mu.Unlock()
	all.drop(func(other *namedSite) bool { return other.name == name })
	all.sites = append(all.sites, s)
	slices.SortFunc(all.sites, func(a, b *namedSite) int { return cmp.Compare(a.name, b.name) })
	all.begin(s)
	return s, nil
}

// remove ends a site, unless another one has taken its place.
func (all *consoles) remove(s *namedSite) {
	all.mu.Lock()
	defer all.mu.Unlock()
	all.drop(func(other *namedSite) bool { return other == s })
}

func (all *consoles) drop(gone func(*namedSite) bool) {
	all.sites = slices.DeleteFunc(all.sites, func(s *namedSite) bool {
		if !gone(s) {
			return false
		}
		s.end()
		if all.ctx == nil {
			s.pool.Close()
		}
		return true
	})
}

// begin runs what belongs to a site, if the others run.
func (all *consoles) begin(s *namedSite) {
	if all.ctx == nil {
		return
	}
	var ctx context.Context
	ctx, s.end = context.WithCancel(all.ctx)
	all.running.Go(func() {
		s.control.Run(ctx)
		s.pool.Close()
	})
}

func (all *consoles) list() []*namedSite {
	all.mu.Lock()
	defer all.mu.Unlock()
	return slices.Clone(all.sites)
}

// follow makes a site say what a relay sees of its database.
func (all *consoles) follow(s *namedSite, state func() relay.State) {
	s.control.Follow(state)
	all.mu.Lock()
	defer all.mu.Unlock()
	s.state = state
}

func (all *consoles) entries() (list []page.Entry) {
	all.mu.Lock()
	defer all.mu.Unlock()
	for _, s := range all.sites {
		list = append(list, page.Entry{Name: s.name, Served: s.state != nil && s.state().Registered})
	}
	return list
}

// reloaded takes over what pages show of a configuration, but for the outboxes that refused it.
func (all *consoles) reloaded(c *config.Config, refused []string) {
	for _, s := range all.list() {
		if !slices.Contains(refused, s.name) {
			s.reloaded(c)
		}
	}
}

// serve makes the index and what leads to each site, behind the guard.
func (all *consoles) serve() (http.Handler, error) {
	prefix := all.c.Admin.PathPrefix
	index, err := page.New(page.Config{Prefix: prefix, Relay: all.c.Relay.Name, Version: all.version, Log: all.c.Log})
	if err != nil {
		return nil, err //nolint:wrapcheck // it says what it could not do
	}
	mux := http.NewServeMux()
	mux.Handle("/", index.Index(all.entries))
	mux.HandleFunc(databasesPath, func(w http.ResponseWriter, r *http.Request) {
		name, _, below := strings.Cut(strings.TrimPrefix(r.URL.Path, databasesPath), "/")
		list := all.list()
		at := slices.IndexFunc(list, func(s *namedSite) bool { return s.name == name })
		switch {
		case at < 0:
			refusing("", index)(w, r, http.StatusNotFound, "There is nothing here", "This process serves no database of this name.")
		case !below:
			http.Redirect(w, r, prefix+databasesPath+list[at].name+"/", http.StatusSeeOther)
		default:
			list[at].handler.ServeHTTP(w, r)
		}
	})
	return guarded(all.c, mux, index), nil
}

// start serves until end is called. Operations that run then are interrupted between two batches.
func (all *consoles) start(stopping context.Context) (end func()) {
	if all.server == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(stopping))
	all.mu.Lock()
	all.ctx = ctx
	for _, s := range all.sites {
		all.begin(s)
	}
	all.mu.Unlock()
	var serving sync.WaitGroup
	serving.Go(func() { all.server.Run(ctx, lazily(all.serve)) })
	return func() {
		cancel()
		serving.Wait()
		all.running.Wait()
	}
}

// close gives up consoles that do not start.
func (all *consoles) close() {
	all.server.Close()
	for _, s := range all.list() {
		all.remove(s)
	}
}
