package localpg

import (
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

//go:embed pooler.sh
var poolerScript string

const (
	poolerPrefix = "/tmp/outbox-relay-bouncer-"
	poolerPort   = "6432" // only a part of a socket's name
)

// ErrNoPooler says that PgBouncer is not installed.
var ErrNoPooler = errors.New("find PgBouncer: it is neither on PATH nor in /usr/sbin; " +
	"install it with `apt-get install pgbouncer` or `brew install pgbouncer`")

// Pooler is a PgBouncer, in transaction mode unless its settings say otherwise, made by
// [StartPooler]. Like a [Server] it listens on a unix socket, runs as an unprivileged account, and
// does not outlive the process that started it. Its methods may be called concurrently.
type Pooler struct {
	dir     string
	janitor *janitor
}

// StartPooler starts a PgBouncer that leads to every database of the server whose socket dsn names,
// as [Server.DSN] returns it. settings are further lines of its section [pgbouncer], such as
// "pool_mode = session". The error is [ErrNoPooler] when it is not installed.
func StartPooler(dsn string, settings ...string) (*Pooler, error) {
	program, err := findPooler()
	if err != nil {
		return nil, err
	}
	server, err := url.Parse(dsn)
	if err != nil {
		return nil, fmt.Errorf("start PgBouncer: %w", err)
	}
	p := &Pooler{dir: poolerPrefix + strings.ToLower(rand.Text()[:10])}
	if p.janitor, err = startJanitor(poolerScript, p.dir, program, unprivileged(), append([]string{
		"[databases]",
		"* = host=" + server.Query().Get("host") + " port=" + server.Query().Get("port"),
		"[pgbouncer]",
		"listen_port = " + poolerPort, "unix_socket_dir = " + p.dir,
		"auth_type = trust", "auth_file = " + p.dir + "/users", "admin_users = postgres",
		"pool_mode = transaction", "max_client_conn = 1000", "default_pool_size = 4",
		// By default it waits 15 seconds after an attempt to connect that failed, which only makes
		// tests of outages slow.
		"server_login_retry = 1",
	}, settings...)); err != nil {
		return nil, fmt.Errorf("start PgBouncer: %w", err)
	}
	if err := p.Resume(); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

func findPooler() (string, error) {
	if path, err := exec.LookPath("pgbouncer"); err == nil {
		return filepath.Abs(path)
	}
	const usual = "/usr/sbin/pgbouncer" // Debian, where users have no sbin on their PATH
	if _, err := os.Stat(usual); err == nil {
		return usual, nil
	}
	return "", ErrNoPooler
}

// DSN returns the URL of database through the pooler. The database "pgbouncer" is its console.
func (p *Pooler) DSN(database string) string { return socketURL(p.dir, poolerPort, database) }

// Kill ends PgBouncer at once, as a crash would, with all connections through it.
func (p *Pooler) Kill() error { return p.ask("kill", "ok") }

// Resume starts PgBouncer again after [Pooler.Kill], at the same address.
func (p *Pooler) Resume() error { return p.ask("start", "up") }

func (p *Pooler) ask(verb, want string) error {
	reply, err := p.janitor.ask(verb)
	if err == nil && reply != want {
		err = errors.New(reply)
	}
	if err != nil {
		return fmt.Errorf("%s PgBouncer: %w", verb, err)
	}
	return nil
}

// Stop ends PgBouncer and removes its directory.
func (p *Pooler) Stop() error {
	if err := p.janitor.dismiss(); err != nil {
		return fmt.Errorf("stop PgBouncer: %w", err)
	}
	return nil
}
