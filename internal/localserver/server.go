// Package localserver runs the server of another project for tests, in a directory and a process of
// its own that end with this process, however this one ends: on a unix socket there, so that no
// port is taken and no other account gets in, or on a port of the loopback address where a server
// knows nothing else.
package localserver

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

//go:embed guard.sh
var guardScript string

// Server is a running server, made by [Start]. Its methods are for one goroutine at a time.
type Server struct {
	dir     string
	command []string
	port    string // of a server that [StartAt] has started; empty: it listens on the socket

	guard  *exec.Cmd
	in     io.WriteCloser // the guard's; its end ends the server
	ended  chan struct{}  // closed when the server has ended
	waiter *sync.WaitGroup
}

// Start runs what command returns for the server's directory, and returns when the socket in it,
// which is called socket, accepts connections. ctx bounds starting only. The error quotes what the
// server printed; nothing is left behind then.
func Start(ctx context.Context, command func(dir string) []string) (*Server, error) {
	return StartAt(ctx, "", command)
}

// StartAt is Start for a server that listens on a port of 127.0.0.1.
func StartAt(ctx context.Context, port string, command func(dir string) []string) (*Server, error) {
	dir, err := os.MkdirTemp("", "outbox-relay-server-")
	if err != nil {
		return nil, fmt.Errorf("make directory: %w", err)
	}
	s := &Server{dir: dir, command: command(dir), port: port}
	if err := s.Restart(ctx); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

// Socket returns the path of the unix socket.
func (s *Server) Socket() string { return filepath.Join(s.dir, "socket") }

// Restart starts the server after [Server.Kill], with the files that it has left.
func (s *Server) Restart(ctx context.Context) error {
	// A server that was killed leaves its socket behind, and some will not replace it.
	if err := os.Remove(s.Socket()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove old socket: %w", err)
	}
	log, err := os.OpenFile(s.log(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	defer log.Close()
	s.guard = exec.Command("/bin/sh", append([]string{"-c", guardScript, "guard", s.dir}, s.command...)...)
	s.guard.Dir = s.dir
	s.guard.Stdout, s.guard.Stderr = log, log
	s.guard.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C reaches it as the end of its input only
	// Not StdinPipe, whose end comes with the server's: the guard would remove the log before
	// anybody has read it.
	out, in, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("open pipe to %s: %w", s.command[0], err)
	}
	defer out.Close()
	s.guard.Stdin = out
	if err := s.guard.Start(); err != nil {
		in.Close()
		return fmt.Errorf("start %s: %w", s.command[0], err)
	}
	s.in = in
	ended := make(chan struct{})
	s.ended, s.waiter = ended, &sync.WaitGroup{}
	s.waiter.Go(func() {
		defer close(ended)
		_ = s.guard.Wait() // killed, as always
	})
	return s.accepts(ctx)
}

// accepts returns when a connection is accepted.
func (s *Server) accepts(ctx context.Context) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	network, address := "unix", s.Socket()
	if s.port != "" {
		network, address = "tcp", net.JoinHostPort("127.0.0.1", s.port)
	}
	for {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-s.ended:
			return fmt.Errorf("%s ended:\n%s", s.command[0], s.LogTail())
		case <-ctx.Done():
			return fmt.Errorf("%s does not accept connections: %w\n%s", s.command[0], err, s.LogTail())
		case <-tick.C:
		}
	}
}

// Kill ends the server as a crash would, and leaves its files. It returns when the process is gone.
// A server that does not run stays as it is.
func (s *Server) Kill() { s.end("keep\n") }

// Stop ends the server and removes its directory.
func (s *Server) Stop() error {
	s.end("")
	if err := os.RemoveAll(s.dir); err != nil {
		return fmt.Errorf("remove directory: %w", err)
	}
	return nil
}

func (s *Server) end(word string) {
	if s.in == nil {
		return
	}
	_, _ = io.WriteString(s.in, word)
	s.in.Close()
	s.waiter.Wait()
	s.in = nil
}

// LogTail returns the end of what the server printed.
func (s *Server) LogTail() string {
	text, err := os.ReadFile(s.log())
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

func (s *Server) log() string { return filepath.Join(s.dir, "log") }
