package relay

import (
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/outbox-relay/outbox-relay/relay/pg"
	"github.com/outbox-relay/outbox-relay/relay/policy"
)

// pooler is the part of PgBouncer that matters here: what it does with settings at the start of a connection. It knows
// four; others it refuses, or drops if it was told to ignore them.
type pooler struct {
	server string // path of PostgreSQL's socket
	drops  bool
}

// standBefore makes a connection lead through the pooler.
func (p pooler) standBefore(t *testing.T, conn *pgx.ConnConfig) {
	t.Helper()
	p.server = conn.Host + "/.s.PGSQL." + strconv.Itoa(int(conn.Port))
	address := p.listen(t)
	conn.Host, conn.Port, conn.Fallbacks = address.IP.String(), uint16(address.Port), []*pgconn.FallbackConfig{}
}

func (p pooler) listen(t *testing.T) *net.TCPAddr {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { p.serve(client) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		serving.Wait()
	})
	return listener.Addr().(*net.TCPAddr)
}

func (p pooler) serve(client net.Conn) {
	defer func() { _ = client.Close() }()
	backend := pgproto3.NewBackend(client, client)
	message, err := backend.ReceiveStartupMessage()
	if err != nil {
		return
	}
	startup, ok := message.(*pgproto3.StartupMessage)
	if !ok {
		return
	}
	for name := range startup.Parameters {
		switch name {
		case "user", "database", "client_encoding", "application_name":
			continue
		}
		if !p.drops {
			backend.Send(&pgproto3.ErrorResponse{Severity: "FATAL", Code: "08P01", Message: "unsupported startup parameter: " + name})
			_ = backend.Flush()
			return
		}
		delete(startup.Parameters, name)
	}
	server, err := net.Dial("unix", p.server)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	encoded, err := startup.Encode(nil)
	if err != nil {
		return
	}
	if _, err := server.Write(encoded); err != nil {
		return
	}
	var answers sync.WaitGroup
	answers.Go(func() {
		_, _ = io.Copy(client, server)
		_ = client.Close()
	})
	_, _ = io.Copy(server, client)
	_ = server.Close()
	answers.Wait()
}

// TestPoolerIsRefused runs a relay that was told that there is no pooler: it must say so and end, not deliver without its
// locks, and not retry for ever. The same holds for what else can not be worked with.
func TestPoolerIsRefused(t *testing.T) {
	t.Parallel()
	for name, drops := range map[string]bool{"refuses settings": false, "drops settings": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			cfg := db.config(to("http://127.0.0.1:1"))
			cfg.Pooler.Mode = PoolerNone
			pooler{drops: drops}.standBefore(t, cfg.Pool.ConnConfig)
			r, err := New(cfg)
			must(t, err)
			err = r.Run(t.Context())
			if !errors.Is(err, pg.ErrPooler) || !strings.Contains(err.Error(), "direct connection") {
				t.Errorf("got %v, want ErrPooler", err)
			}
			if n := row[int](db, "SELECT count(*)::int FROM outbox_relay"); n != 0 {
				t.Errorf("%d relays registered through the pooler", n)
			}
		})
	}
}

// Unless told otherwise, a relay that finds a pooler works through it, and asks producers for nothing that it would not
// hear.
func TestPoolerIsFound(t *testing.T) {
	t.Parallel()
	for name, drops := range map[string]bool{"refuses settings": false, "drops settings": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			rc := newReceiver(t, nil)
			cfg := db.config(to(rc.URL))
			pooler{drops: drops}.standBefore(t, cfg.Pool.ConnConfig)
			r := start(t, cfg)
			r.await(t, "idleness", func(o *observer) bool { return o.idle > 0 })
			if row[bool](db, `SELECT session_pid IS NOT NULL FROM outbox_relay`) || row[bool](db, armed) {
				t.Error("a relay behind a pooler has a session or is armed")
			}
			db.insert(10, "key")
			r.settles(t, policy.Delivered, 10)
		})
	}
}

// A relay with a direct connection for its session is as good as one without a pooler.
func TestSessionPastThePooler(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	rc := newReceiver(t, nil)
	cfg := db.config(to(rc.URL))
	cfg.PollInterval = time.Hour
	cfg.Pooler.Session = settings(t, db.dsn)
	pooler{}.standBefore(t, cfg.Pool.ConnConfig)
	r := start(t, cfg)
	r.instance()
	becomes(db, true, `SELECT session_pid IS NOT NULL FROM outbox_relay`)
	becomes(db, true, armed)
	db.insert(10, "key")
	r.settles(t, policy.Delivered, 10)
}

// Relays with and without a session live side by side: neither takes the other for dead, and each rescues the other kind
// when it is.
func TestRelaysWithAndWithoutSession(t *testing.T) {
	t.Parallel()
	for name, pooled := range map[string]bool{"direct survivor": false, "pooled survivor": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			db.insert(4, "key")
			// Two of each kind, one of them dead.
			db.exec(`INSERT INTO outbox_relay (name, version, session_pid, heartbeat_at, lease) VALUES
				('connected', '', 0, now() + interval '1 hour', '2 hours'), ('gone', '', 0, now(), '2 hours'),
				('heard', '', NULL, now() - interval '1 hour', '2 hours'), ('silent', '', NULL, now() - interval '3 hours', '2 hours')`)
			holder, err := db.pool.Acquire(t.Context())
			must(t, err)
			defer holder.Release()
			db.connectAs(holder, row[int32](db, `SELECT instance FROM outbox_relay WHERE name = 'connected'`))
			db.exec(`UPDATE outbox_delivery d SET claimed_by = r.instance, lease_expires_at = now() + interval '1 hour'
				FROM (SELECT instance, row_number() OVER () AS n FROM outbox_relay) r WHERE r.n = d.event_id`)
			cfg := db.config(to(newReceiver(t, nil).URL))
			if pooled {
				pooler{}.standBefore(t, cfg.Pool.ConnConfig)
			}
			r := prepared(t, cfg)
			r.session.WatchFor = time.Nanosecond
			r.begin()
			r.settles(t, policy.Delivered, 2)
			if got := row[string](db, `SELECT string_agg(name, ' ' ORDER BY name) FROM outbox_relay`); got != "connected heard test" {
				t.Errorf("registered: %s", got)
			}
		})
	}
}
