package page

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
)

// A link is the way to a database, which may break, or carry nothing.
type link struct {
	state atomic.Int32

	mu    sync.Mutex
	conns []net.Conn
}

const (
	linkWorks = iota
	linkBroken
	linkSilent
)

// pool returns a pool over the link.
func (l *link) pool(t *testing.T, dsn string) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(dsn)
	relaytest.Must(t, err)
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if l.state.Load() == linkBroken {
			return nil, errors.New("broken")
		}
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.conns = append(l.conns, conn)
		return &linkedConn{conn, l}, nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	relaytest.Must(t, err)
	t.Cleanup(func() {
		l.mend()
		pool.Close()
	})
	return pool
}

// fix makes the link work again, with new connections.
func (l *link) mend() {
	l.state.Store(linkWorks)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, conn := range l.conns {
		_ = conn.Close() // a pool waits for the end of one that is silent
	}
	l.conns = nil
}

type linkedConn struct {
	net.Conn
	link *link
}

func (c *linkedConn) Write(b []byte) (int, error) {
	switch c.link.state.Load() {
	case linkBroken:
		_ = c.Close()
		return 0, errors.New("broken")
	case linkSilent:
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// falseWithoutDatabase is what a page may say only when the database has said it.
var falseWithoutDatabase = []string{"No alert is open", "No relay is registered", "Nothing was changed yet", "No event yet", "No delivery matches", "All is well", "No destination yet", "Narrow it"}

// While the database is away or answers nothing, each page says so, shows what it showed last with
// its age, claims nothing else, names nothing of the connection, and continues by itself.
func TestPagesWithoutTheirDatabase(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		state int32
		says  string
	}{
		"away":   {linkBroken, "The database cannot be reached"},
		"silent": {linkSilent, "The database does not answer"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			db.Insert(1, "k")
			db.Settled("failed", "true")
			db.Exec(`INSERT INTO outbox_relay (name, version) VALUES ('known-relay', '1'); INSERT INTO outbox_alert (rule, subject) VALUES ('lag', 'known-subject')`)
			db.Exec(`INSERT INTO outbox_audit (actor, origin, action, state, selection) VALUES ('known-actor', 'page', 'replay', 'running', '{"destination": "default"}')`)
			known := map[string]string{
				"/": "1 delivery to &#34;default&#34; failed", "/destinations/default": "1 delivery to &#34;default&#34; failed", "/events": `id="row-1-default"`, "/events/1": "<h1>Event 1</h1>",
				"/operations/1": "known-actor", "/alerts": "known-subject", "/relays": "known-relay", "/audit": "known-actor",
			}
			var l link
			s, never := serve(t, l.pool(t, db.DSN)), serve(t, l.pool(t, db.DSN))
			for path, text := range known {
				if status, body := s.get(path); status != 200 || !strings.Contains(body, text) || strings.Contains(body, `id="old"`) {
					t.Fatalf("%s: %d without %q:\n%s", path, status, text, body)
				}
			}
			never.get("/") // so that it has a connection
			l.state.Store(c.state)
			if c.state == linkSilent { // what answers nothing needs no time for it, however busy the machine is
				s.within, never.within = 100*time.Millisecond, 100*time.Millisecond
			}
			s.forget() // the status that was read just now
			never.forget()
			secret := db.Pool.Config().ConnConfig.Database
			var asked sync.WaitGroup
			for path, text := range known {
				asked.Go(func() { s.wantOld(path, c.says, text, secret) })
				if path != "/" { // which it has read
					asked.Go(func() { never.wantNothing(path, c.says, text, secret) })
				}
			}
			asked.Wait()
			l.mend()
			s.within = 0
			for path, text := range known {
				if status, body := s.get(path); status != 200 || strings.Contains(body, `id="old"`) || !strings.Contains(body, text) {
					t.Errorf("%s, back again: %d\n%s", path, status, body)
				}
			}
		})
	}
}

// wantOld checks that a page says what is wrong, and shows what it showed last.
func (s *site) wantOld(path, says, text, secret string) {
	s.Helper()
	status, body := s.get(path)
	if strings.Contains(body, secret) {
		s.Errorf("%s names the database:\n%s", path, body)
	}
	s.wants(503, path, status, body, []string{says, `id="old"`, text, `hx-trigger="tick from:body"`})
}

// wantNothing checks that a page that was never read says what is wrong, and claims nothing.
func (s *site) wantNothing(path, says, text, secret string) {
	s.Helper()
	status, body := s.get(path)
	if status != 503 || !strings.Contains(body, says) || strings.Contains(body, text) || strings.Contains(body, secret) || !strings.Contains(body, `hx-trigger="tick from:body"`) {
		s.Errorf("%s, never read: %d\n%s", path, status, body)
	}
	for _, claim := range falseWithoutDatabase {
		if strings.Contains(body, claim) {
			s.Errorf("%s says %q of a database that it does not see", path, claim)
		}
	}
}

// What is kept is bounded, and the oldest goes first.
func TestKeptViewsAreFew(t *testing.T) {
	t.Parallel()
	var k kept
	began := time.Now()
	for i := range 3 * maxKept {
		k.keep(strings.Repeat("/", i), view{}, began.Add(time.Duration(i)*time.Second))
	}
	if _, _, known := k.last(strings.Repeat("/", 2*maxKept)); len(k.views) != maxKept || !known {
		t.Errorf("%d views are kept", len(k.views))
	}
}
