package relay

import (
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// pooler is the part of PgBouncer that matters here: what it does with settings at the start of a connection. It knows
// four; others it refuses, or drops if it was told to ignore them.
type pooler struct {
	server string // path of PostgreSQL's socket
	drops  bool
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

// TestPoolerIsRefused runs a relay whose connection does not keep what a session is for: it must say so and end, not
// deliver without its locks, and not retry for ever.
func TestPoolerIsRefused(t *testing.T) {
	t.Parallel()
	for name, drops := range map[string]bool{"refuses settings": false, "drops settings": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			cfg := db.config(to("http://127.0.0.1:1"))
			conn := cfg.Pool.ConnConfig
			address := pooler{server: conn.Host + "/.s.PGSQL." + strconv.Itoa(int(conn.Port)), drops: drops}.listen(t)
			conn.Host, conn.Port = address.IP.String(), uint16(address.Port)
			conn.Fallbacks = []*pgconn.FallbackConfig{}
			r, err := New(cfg)
			must(t, err)
			err = r.Run(t.Context())
			if !errors.Is(err, ErrPooler) || !strings.Contains(err.Error(), "direct connection") {
				t.Errorf("got %v, want ErrPooler", err)
			}
			if n := row[int](db, "SELECT count(*)::int FROM outbox_relay"); n != 0 {
				t.Errorf("%d relays registered through the pooler", n)
			}
		})
	}
}
