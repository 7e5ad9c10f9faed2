package localpg

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/localserver"
)

// prefix begins every server's directory. It stands directly under /tmp, not
// under a longer temporary directory, because the path of a unix socket must
// fit into about 100 bytes and the unprivileged account must be able to reach it.
const prefix = "/tmp/" + dirName

// memoryPrefix is the same in memory, where Linux offers it: cloning a database
// means hundreds of small files, and some disks take ten times as long for them.
const memoryPrefix = "/dev/shm/" + dirName

const dirName = "outbox-relay-pg-"

// memoryNeeded is how many bytes must be free in memory for a server to live there.
const memoryNeeded = 4 << 30

// Options says how to run a [Server]. The zero value is right for tests: found
// binaries, a unix socket only, and no care for durability.
type Options struct {
	// ListenTCP also listens on a free port of 127.0.0.1. Every local user may
	// then connect as superuser, unless Password is set.
	ListenTCP bool

	// Password is what the superuser must give over TCP, not over the socket.
	// Empty: none. CopyOf takes no Password: the copy has the original's.
	Password string

	// Durable keeps fsync, full_page_writes and synchronous_commit on, as
	// production has them. False: off, several times faster, and a crash of the
	// machine (not of PostgreSQL) loses data.
	Durable bool

	// CopyOf is the directory of a cluster to start a copy of, in place of a new one: the data of a
	// server that is down, or what [Server.BaseBackup] made.
	CopyOf string

	// Settings are further server settings, by their names in postgresql.conf.
	// They win over every default here but the port and the addresses.
	Settings map[string]string

	// Env is what the server has in its environment beyond a few fixed variables, as NAME=value.
	Env []string
}

// newDir returns the path of a directory that does not exist yet.
func (o Options) newDir() string {
	chosen := prefix
	if !o.Durable && freeBytes(filepath.Dir(memoryPrefix)) >= memoryNeeded {
		chosen = memoryPrefix
	}
	return chosen + strings.ToLower(rand.Text()[:10])
}

// Server is a running throwaway PostgreSQL, made by [Start]. Its methods may be
// called concurrently. Its superuser is postgres, without a password; its
// encoding is UTF8, its collation C, its time zone UTC.
type Server struct {
	dir     string
	binDir  string
	account account
	tcp     bool
	lock    *os.File
	janitor *janitor
	stop    func() error

	mu   sync.Mutex // guards port, and lets one fault be made at a time
	port string

	administration sync.Mutex // guards admin
	admin          *pgx.Conn  // nil: none is open
}

// Start makes a new PostgreSQL and returns once it accepts connections, in
// about a second. ctx bounds starting only. The error names what to install
// when there is no PostgreSQL, and quotes the server's log when it does not
// start; nothing is left behind then.
func Start(ctx context.Context, o Options) (*Server, error) {
	binDir, err := findBinDir(ctx, "", binDirs)
	if err != nil {
		return nil, err
	}
	s := &Server{
		dir:     o.newDir(),
		binDir:  binDir,
		account: unprivileged(),
		tcp:     o.ListenTCP,
	}
	s.stop = sync.OnceValue(s.cleanUp)
	sweep(ctx, binDir, s.account)
	if s.janitor, err = startJanitor(janitorScript, s.dir, binDir, s.account, o.arguments(), o.Env...); err != nil {
		return nil, fmt.Errorf("start PostgreSQL: %w", err)
	}
	if err := s.boot(ctx, o); err != nil {
		return nil, errors.Join(fmt.Errorf("start PostgreSQL: %w", err), s.Stop())
	}
	return s, nil
}

func (o Options) arguments() []string {
	settings := map[string]string{
		"max_connections": "200",
		"timezone":        "UTC",
		"log_timezone":    "UTC",
		// Files in the directory, which go with it. A process that ends at the wrong
		// moment leaves other kinds behind in /dev/shm, where they are not looked for.
		"dynamic_shared_memory_type": "mmap",
	}
	if !o.Durable {
		settings["fsync"] = "off"
		settings["full_page_writes"] = "off"
		settings["synchronous_commit"] = "off"
	}
	maps.Copy(settings, o.Settings)
	var args []string
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		args = append(args, "-c", name+"="+settings[name])
	}
	return args
}

func (s *Server) boot(ctx context.Context, o Options) error {
	var err error
	if s.lock, err = lockDir(s.dir); err != nil {
		return err
	}
	origin := []any{"init"}
	if o.Password != "" {
		origin = append(origin, "scram-sha-256")
	}
	if o.CopyOf != "" {
		origin = []any{"copy", o.CopyOf}
	}
	switch reply, err := s.janitor.ask(origin...); {
	case err != nil:
		return err
	case reply != "ok":
		return fmt.Errorf("%s failed:\n%s", origin[0], s.LogTail(20))
	}
	if err := s.firstStart(ctx); err != nil || o.Password == "" {
		return err
	}
	return s.administer(ctx, func(*pgx.Conn) string {
		return "ALTER ROLE postgres PASSWORD '" + strings.ReplaceAll(o.Password, "'", "''") + "'"
	})
}

// firstStart chooses the port and starts PostgreSQL.
func (s *Server) firstStart(ctx context.Context) (failed error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.tcp {
		s.port = "5432" // only a part of the socket's name
		return s.start(ctx)
	}
	// Another process may take a free port before PostgreSQL does.
	for range 3 {
		free, err := localserver.FreePorts(1)
		if err != nil {
			return err
		}
		s.port = free[0]
		if failed = s.start(ctx); failed == nil || ctx.Err() != nil {
			return failed
		}
	}
	return failed
}

// DSN returns the URL of database on this server, over the unix socket. pgx,
// goose and psql all take it. An empty database means postgres.
func (s *Server) DSN(database string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return socketURL(s.dir, s.port, cmp.Or(database, "postgres"))
}

// socketURL returns the URL of a database behind the unix socket in a directory.
func socketURL(dir, port, database string) string {
	query := url.Values{"host": {dir}, "port": {port}, "sslmode": {"disable"}}
	return (&url.URL{Scheme: "postgres", User: url.User("postgres"), Path: "/" + database, RawQuery: query.Encode()}).String()
}

// TCPAddr returns "127.0.0.1:port", or "" without [Options.ListenTCP]. It is
// the same after a restart.
func (s *Server) TCPAddr() string {
	if !s.tcp {
		return ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return net.JoinHostPort("127.0.0.1", s.port)
}

// Dir returns the directory of the server: the socket, the log, and below
// data the cluster. It is gone after [Server.Stop].
func (s *Server) Dir() string { return s.dir }

// BinDir returns the directory of the PostgreSQL programs in use.
func (s *Server) BinDir() string { return s.binDir }

// LogTail returns the last n lines the server logged, or "" when there is no log.
func (s *Server) LogTail(n int) string {
	log, err := os.ReadFile(filepath.Join(s.dir, "log"))
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimRight(string(log), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// Stop ends the server and removes its directory. Calling it again returns the
// same result; calling it never leaves the same state, once this process ends.
func (s *Server) Stop() error { return s.stop() }

func (s *Server) cleanUp() error {
	s.closeAdministration()
	err := s.janitor.dismiss()
	if s.lock != nil {
		defer s.lock.Close()
	}
	if _, statErr := os.Stat(s.dir); !os.IsNotExist(statErr) {
		// The janitor was killed. Its work is done here instead.
		err = reap(context.Background(), s.dir, s.binDir, s.account)
	}
	if err != nil {
		return fmt.Errorf("stop PostgreSQL: %w", err)
	}
	return nil
}
