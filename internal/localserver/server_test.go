package localserver_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/localserver"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// patience ends a test that would hang. No assertion depends on it.
const patience = 30 * time.Second

// role makes this test binary play another process: a server, or the owner of one.
const role = "LOCALSERVER_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(role) {
	case "":
		os.Exit(m.Run())
	case "server":
		serve()
	case "owner":
		own()
	}
}

// serve answers every connection with what its directory held when it started.
func serve() {
	if len(os.Args) > 2 {
		fmt.Println("told to fail")
		os.Exit(1)
	}
	found := "nothing"
	if text, err := os.ReadFile("kept"); err == nil {
		found = string(text)
	}
	listener, err := net.Listen("unix", filepath.Join(os.Args[1], "socket"))
	if err != nil {
		panic(err)
	}
	if err := os.WriteFile("kept", []byte("data"), 0o600); err != nil {
		panic(err)
	}
	for {
		conn, err := listener.Accept()
		if err != nil {
			panic(err)
		}
		io.WriteString(conn, found)
		conn.Close()
	}
}

// own starts a server, says where, and waits to be killed.
func own() {
	s, err := localserver.Start(context.Background(), command())
	if err != nil {
		panic(err)
	}
	fmt.Println(s.Socket())
	io.Copy(io.Discard, os.Stdin)
	select {}
}

func command(arguments ...string) func(dir string) []string {
	return func(dir string) []string {
		self, err := os.Executable()
		if err != nil {
			panic(err)
		}
		return append([]string{"env", role + "=server", self, dir}, arguments...)
	}
}

func ask(t *testing.T, socket string) (string, error) {
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "unix", socket)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	text, err := io.ReadAll(conn)
	return string(text), err
}

func TestKillRestartStop(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := localserver.Start(ctx, command())
	testkit.Must(t, err)
	if got, err := ask(t, s.Socket()); got != "nothing" || err != nil {
		t.Errorf("a new server answered %q, %v", got, err)
	}
	for range 2 {
		s.Kill()
		s.Kill()
		if _, err := ask(t, s.Socket()); err == nil {
			t.Error("a killed server accepts connections")
		}
		testkit.Must(t, s.Restart(ctx))
		if got, err := ask(t, s.Socket()); got != "data" || err != nil {
			t.Errorf("a restarted server answered %q, %v", got, err)
		}
	}
	if err := s.Stop(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Dir(s.Socket())); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("its directory is still there: %v", err)
	}
}

func TestServerThatDoesNotStart(t *testing.T) {
	t.Parallel()
	var dir string
	_, err := localserver.Start(t.Context(), func(d string) []string {
		dir = d
		return command("fail")(d)
	})
	if err == nil || !strings.Contains(err.Error(), "told to fail") {
		t.Errorf("error %v does not say what the server printed", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("its directory is still there: %v", err)
	}
}

// Nothing outlives a test that is killed.
func TestServerEndsWithItsOwner(t *testing.T) {
	t.Parallel()
	owner := exec.CommandContext(t.Context(), os.Args[0])
	owner.Env = append(os.Environ(), role+"=owner")
	in, err := owner.StdinPipe()
	testkit.Must(t, err)
	defer in.Close()
	out, err := owner.StdoutPipe()
	testkit.Must(t, err)
	testkit.Must(t, owner.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	testkit.Must(t, err)
	socket := strings.TrimSpace(line)
	if _, err := ask(t, socket); err != nil {
		t.Fatal(err)
	}
	testkit.Must(t, owner.Process.Kill())
	_ = owner.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for ctx.Err() == nil {
		_, asked := ask(t, socket)
		_, there := os.Stat(filepath.Dir(socket))
		if asked != nil && errors.Is(there, fs.ErrNotExist) {
			return
		}
	}
	t.Errorf("the server or its directory outlives its owner: %s", filepath.Dir(socket))
}
