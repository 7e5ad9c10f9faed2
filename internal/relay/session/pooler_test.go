package session

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// pooler is the part of PgBouncer that matters here: what it does with settings at the start of a
// connection. It knows four; others it refuses, or drops if it was told to ignore them.
type pooler struct {
	server string // path of PostgreSQL's socket
	drops  bool
}

// standBefore makes a connection lead through the pooler.
func (p pooler) standBefore(t testing.TB, conn *pgx.ConnConfig) {
	t.Helper()
	p.server = conn.Host + "/.s.PGSQL." + strconv.Itoa(int(conn.Port))
	address := p.listen(t)
	conn.Host, conn.Port, conn.Fallbacks = address.IP.String(), uint16(address.Port), []*pgconn.FallbackConfig{}
}

func (p pooler) listen(t testing.TB) *net.TCPAddr {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	relaytest.Must(t, err)
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

// A relay that was told that there is no pooler must say so, not work without its session, and not
// retry for ever. Unless told, it works through the pooler, where nothing listens and its heartbeat
// alone says that it lives.
func TestPoolerIsFound(t *testing.T) {
	t.Parallel()
	for name, drops := range map[string]bool{"refuses settings": false, "drops settings": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			told := prepared(db)
			told.Config.Pooler.Mode = PoolerNone
			pooler{drops: drops}.standBefore(t, told.Config.Pool.ConnConfig)
			relaytest.Must(t, told.Open(t.Context()))
			defer told.Database.Direct.Close()
			if err := told.Check(t.Context()); !errors.Is(err, pg.ErrPooler) || !strings.Contains(err.Error(), "direct connection") {
				t.Errorf("got %v, want ErrPooler", err)
			}

			r := prepared(db)
			pooler{drops: drops}.standBefore(t, r.Config.Pool.ConnConfig)
			var log bytes.Buffer
			r.Config.Log = zerolog.New(&log)
			r.begin().alive()
			r.await("a beat", func() bool { return r.beats > 0 })
			if !r.Database.Deaf || len(r.listening) != 0 || !relaytest.Row[bool](db, `SELECT session_pid IS NULL FROM outbox_relay`) {
				t.Error("a relay behind a pooler has a session")
			}
			r.stop()
			if n := relaytest.Row[int](db, relays); n != 0 || !strings.Contains(log.String(), "working through a connection pooler") {
				t.Errorf("%d relays are left, the log is %s", n, log.String())
			}
		})
	}
}

// A relay with a direct connection for its session is woken and rescued as one without a pooler,
// and is refused if that connection leads to another database. Without a pooler, the second URL
// does no harm.
func TestSessionPastThePooler(t *testing.T) {
	t.Parallel()
	for name, pooled := range map[string]bool{"pooler": true, "no pooler": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := relaytest.Covered(t)
			direct, err := pgxpool.ParseConfig(db.DSN)
			relaytest.Must(t, err)
			r := prepared(db)
			if r.Config.Pooler.Session = direct; pooled {
				pooler{}.standBefore(t, r.Config.Pool.ConnConfig)
			}
			r.begin().alive()
			if r.Database.Deaf || !relaytest.Row[bool](db, `SELECT `+pg.HasSession+` FROM outbox_relay r`) {
				t.Error("it has no session")
			}
			relaytest.Must(t, r.Producers.Arm(t.Context(), db.Pool, true))
			db.Insert(1, "key")
			r.await("a notification", func() bool { return r.asked.Commits > 0 })
		})
	}
	t.Run("another database", func(t *testing.T) {
		t.Parallel()
		r := prepared(relaytest.Covered(t))
		elsewhere, err := pgxpool.ParseConfig(relaytest.Covered(t).DSN)
		relaytest.Must(t, err)
		r.Config.Pooler.Session = elsewhere
		r.begin().awaitFailures(2)
		r.change(func() {
			if !errors.Is(r.last, pg.ErrTwoDatabases) {
				t.Errorf("the failure is %v", r.last)
			}
		})
	})
}

// A schema that is newer and only adds is worked with, and the log says so, as it says who may
// create objects in the schema: they run code with the rights of the relay. A schema that cannot be
// worked with is an error that stays.
func TestCheckOfTheSchema(t *testing.T) {
	t.Parallel()
	db := relaytest.Covered(t)
	r := prepared(db)
	var log bytes.Buffer
	r.Config.Log = zerolog.New(&log)
	relaytest.Must(t, r.Open(t.Context()))
	defer r.Database.Direct.Close()
	if relaytest.Must(t, r.Check(t.Context())); log.Len() > 0 {
		t.Errorf("the log says %s", log.String())
	}
	db.Exec(`INSERT INTO outbox_schema_version (version_id, is_applied) VALUES (9999, true); GRANT CREATE ON SCHEMA public TO PUBLIC, pg_read_all_data`)
	relaytest.Must(t, r.Check(t.Context()))
	for _, want := range []string{`"database":9999`, `"roles":["PUBLIC","pg_read_all_data"],"run":"REVOKE CREATE ON SCHEMA public FROM PUBLIC, pg_read_all_data; `} {
		if strings.Count(log.String(), want) != 1 {
			t.Errorf("the log does not say %s once:\n%s", want, log.String())
		}
	}
	db.Exec(`DROP TABLE outbox_schema_version`)
	testkit.ErrorIs(t, "without a schema", r.Check(t.Context()), pg.ErrSchema)
}
