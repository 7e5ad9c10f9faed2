//go:build unix

package localpg

import (
	"context"
	"errors"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// query returns the single value that sql yields.
func query(t *testing.T, dsn, sql string) (value string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	testkit.Must(t, err)
	defer conn.Close(context.Background())
	if err := conn.QueryRow(t.Context(), sql).Scan(&value); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return value
}

func TestServer(t *testing.T) {
	t.Parallel()
	s := start(t, Options{
		ListenTCP: true,
		Settings:  map[string]string{"max_connections": "17", "cluster_name": "it's two words", "port": "1"},
	})
	want := map[string]string{
		"max_connections":    "17",
		"cluster_name":       "it's two words",
		"fsync":              "off",
		"synchronous_commit": "off",
		"server_encoding":    "UTF8",
		"timezone":           "UTC",

		"dynamic_shared_memory_type": "mmap", // nothing outside the directory
	}
	for name, want := range want {
		if got := query(t, s.DSN(""), "SHOW "+name); got != want {
			t.Errorf("%s = %q, want %q", name, got, want)
		}
	}
	if got := query(t, "postgres://postgres@"+s.TCPAddr()+"/postgres?sslmode=disable", "SELECT 'tcp'"); got != "tcp" {
		t.Errorf("over TCP: %q", got)
	}
	testkit.Must(t, s.CreateDatabase(t.Context(), `odd "name"`, ""))
	psql := exec.Command(filepath.Join(s.BinDir(), "psql"), "-X", "-Atc", "SELECT current_database()", s.DSN(`odd "name"`))
	s.DropPrivileges(psql)
	if out, err := psql.CombinedOutput(); err != nil || string(out) != "odd \"name\"\n" {
		t.Errorf("psql: %v, %s", err, out)
	}
	for range 2 {
		if err := s.DropDatabase(t.Context(), `odd "name"`); err != nil {
			t.Error(err)
		}
	}
	if tail := s.LogTail(1); strings.Count(tail, "\n") != 0 || tail == "" {
		t.Errorf("LogTail(1) = %q", tail)
	}
	for range 2 {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
		if left := processes(t, s.Dir()); exists(s.Dir()) || len(left) > 0 {
			t.Errorf("Stop left %s, %q", s.Dir(), left)
		}
	}
	if err := s.StartAgain(t.Context()); err == nil {
		t.Error("StartAgain after Stop succeeded")
	}
	if tail := s.LogTail(1); tail != "" {
		t.Errorf("LogTail after Stop = %q", tail)
	}
}

func TestDurable(t *testing.T) {
	t.Parallel()
	s := start(t, Options{Durable: true})
	if got := query(t, s.DSN(""), "SELECT concat_ws(' ', current_setting('fsync'), current_setting('full_page_writes'), current_setting('synchronous_commit'))"); got != "on on on" {
		t.Errorf("fsync, full_page_writes, synchronous_commit = %s", got)
	}
	if s.TCPAddr() != "" || query(t, s.DSN(""), "SHOW listen_addresses") != "" {
		t.Error("the server listens on TCP unasked")
	}
}

func TestPassword(t *testing.T) {
	t.Parallel()
	const password = "it's a secret"
	s := start(t, Options{ListenTCP: true, Password: password})
	dsn := url.URL{Scheme: "postgres", User: url.UserPassword("postgres", password), Host: s.TCPAddr(), Path: "/postgres", RawQuery: "sslmode=disable"}
	if got := query(t, dsn.String(), "SELECT 'tcp'"); got != "tcp" {
		t.Errorf("over TCP: %q", got)
	}
	if got := query(t, s.DSN(""), "SELECT 'socket'"); got != "socket" {
		t.Errorf("over the socket: %q", got)
	}
	for _, user := range []*url.Userinfo{url.User("postgres"), url.UserPassword("postgres", "wrong")} {
		dsn.User = user
		if conn, err := pgx.Connect(t.Context(), dsn.String()); err == nil {
			conn.Close(context.Background())
			t.Errorf("connected as %s", user)
		}
	}
}

func TestFaults(t *testing.T) {
	t.Parallel()
	s := start(t, Options{ListenTCP: true})
	ctx, dsn, addr := t.Context(), s.DSN(""), s.TCPAddr()
	conn, err := pgx.Connect(ctx, dsn)
	testkit.Must(t, err)
	defer conn.Close(context.Background())
	if _, err := conn.Exec(ctx, "CREATE TABLE survivor AS SELECT 'here' AS it"); err != nil {
		t.Fatal(err)
	}
	if err := s.StartAgain(ctx); err == nil || !strings.Contains(err.Error(), "already running") {
		t.Errorf("StartAgain while running: %v", err)
	}
	testkit.Must(t, s.Restart(ctx))
	if err := conn.Ping(ctx); err == nil {
		t.Error("a session outlived the restart")
	}
	if got := query(t, dsn, "SELECT it FROM survivor"); got != "here" {
		t.Errorf("after Restart: %q", got)
	}
	for range 2 { // the second finds nothing to stop
		testkit.Must(t, s.StopImmediate(ctx))
	}
	if conn, err := pgx.Connect(ctx, dsn); err == nil {
		conn.Close(ctx)
		t.Error("connected after StopImmediate")
	}
	testkit.Must(t, s.StartAgain(ctx))
	if got := query(t, dsn, "SELECT it FROM survivor"); got != "here" {
		t.Errorf("after StartAgain: %q", got)
	}
	if s.DSN("") != dsn || s.TCPAddr() != addr {
		t.Error("the addresses changed")
	}
	if !strings.Contains(s.LogTail(1000), "was not properly shut down") {
		t.Error("StopImmediate let the server shut down in order")
	}
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	if err := s.Restart(canceled); !errors.Is(err, context.Canceled) {
		t.Errorf("Restart with a canceled context: %v", err)
	}
}

func TestStartFails(t *testing.T) {
	t.Parallel()
	t.Run("bad setting", func(t *testing.T) {
		t.Parallel()
		_, err := Start(t.Context(), Options{Settings: map[string]string{"shared_buffers": "plenty"}})
		if err == nil || !strings.Contains(err.Error(), `"plenty"`) {
			t.Errorf("the error does not quote the server's log: %v", err)
		}
	})
	t.Run("canceled", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := Start(ctx, Options{}); !errors.Is(err, context.Canceled) {
			t.Errorf("Start = %v", err)
		}
	})
	t.Run("directory exists", func(t *testing.T) {
		t.Parallel()
		dir := t.TempDir()
		if _, err := startJanitor(janitorScript, dir, "/", nil, nil); err == nil || !strings.Contains(err.Error(), "exists") {
			t.Errorf("startJanitor = %v", err)
		}
		if !exists(dir) {
			t.Error("the janitor removed a directory that it had not made")
		}
	})
}

func TestFindBinDir(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	testkit.Must(t, err)
	for _, version := range []string{"9.6", "14", "16"} {
		dir := filepath.Join(root, version, "bin")
		testkit.Must(t, os.MkdirAll(dir, 0o755))
		for _, name := range []string{"initdb", "postgres"} {
			if version == "16" && name == "postgres" {
				continue // only the client was installed
			}
			testkit.Must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o755))
		}
	}
	t.Setenv("PATH", "")
	t.Setenv(BinDirVariable, "")
	patterns := []string{filepath.Join(root, "none"), filepath.Join(root, "*", "bin")}
	if got, err := findBinDir(t.Context(), "", patterns); err != nil || got != filepath.Join(root, "14", "bin") {
		t.Errorf("by pattern: %s, %v; want the newest that has a server", got, err)
	}
	old := filepath.Join(root, "9.6", "bin")
	if got, err := findBinDir(t.Context(), old, patterns); err != nil || got != old {
		t.Errorf("by name: %s, %v", got, err)
	}
	if _, err := findBinDir(t.Context(), root, patterns); err == nil {
		t.Error("a named directory without a server was passed over in silence")
	}
	_, err = findBinDir(t.Context(), "", nil)
	for _, hint := range []string{"apt-get install postgresql", "brew install postgresql"} {
		if err == nil || !strings.Contains(err.Error(), hint) {
			t.Errorf("the error does not say what to install: %v", err)
		}
	}
	t.Setenv("PATH", old)
	if got, err := findBinDir(t.Context(), "", patterns); err != nil || got != old {
		t.Errorf("by PATH: %s, %v", got, err)
	}
	named := filepath.Join(root, "14", "bin")
	t.Setenv(BinDirVariable, named)
	if got, err := findBinDir(t.Context(), "", patterns); err != nil || got != named {
		t.Errorf("by environment: %s, %v; want it before PATH", got, err)
	}
}
