package localpg

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Restart stops PostgreSQL as an administrator would (sessions are ended, a
// checkpoint is written) and starts it again at the same addresses.
func (s *Server) Restart(ctx context.Context) error {
	return s.fault("restart PostgreSQL", func() error {
		if err := s.halt(ctx, "INT"); err != nil {
			return err
		}
		return s.start(ctx)
	})
}

// Shutdown stops PostgreSQL as an administrator would. The directory stays, so that its data can be
// copied with [Options.CopyOf].
func (s *Server) Shutdown(ctx context.Context) error {
	s.closeAdministration()
	return s.fault("shut PostgreSQL down", func() error { return s.halt(ctx, "INT") })
}

// StopImmediate crashes PostgreSQL, as pg_ctl stop -m immediate does: no
// session ends in order, nothing is flushed, and the next start recovers from
// the log. It returns once the last process is gone; the directory stays.
func (s *Server) StopImmediate(ctx context.Context) error {
	return s.fault("crash PostgreSQL", func() error { return s.halt(ctx, "QUIT") })
}

// StartAgain starts PostgreSQL after [Server.StopImmediate] or [Server.Shutdown], at the same
// addresses, and returns once it has recovered and accepts connections.
func (s *Server) StartAgain(ctx context.Context) error {
	return s.fault("start PostgreSQL again", func() error { return s.start(ctx) })
}

// fault makes one fault at a time. Its error says what could not be made.
func (s *Server) fault(what string, do func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := do(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// start launches PostgreSQL and waits until it accepts connections. s.mu is held.
func (s *Server) start(ctx context.Context) error {
	switch reply, err := s.janitor.ask("poll"); {
	case err != nil:
		return err
	case reply == "up":
		return fmt.Errorf("already running in %s", s.dir)
	}
	addr := ""
	if s.tcp {
		addr = "127.0.0.1"
	}
	pid, err := s.janitor.ask("start", s.port, addr)
	if err != nil {
		return err
	}
	return s.poll(ctx, func(reply string) (bool, error) {
		if reply == "down" {
			return false, fmt.Errorf("the server exited:\n%s", s.LogTail(20))
		}
		return s.ready(pid), nil
	})
}

// poll asks the janitor whether PostgreSQL is up or down until that is what done waits for.
func (s *Server) poll(ctx context.Context, done func(reply string) (bool, error)) error {
	for ctx.Err() == nil {
		reply, err := s.janitor.ask("poll")
		if err != nil {
			return err
		}
		if yes, err := done(reply); yes || err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}

// ready reports whether the server with that pid says it accepts connections.
// A crash can leave an earlier server's file behind, hence the comparison.
func (s *Server) ready(pid string) bool {
	const statusLine = 7 // counted from 0; PostgreSQL 10 and later
	status, _ := os.ReadFile(filepath.Join(s.dir, "data", "postmaster.pid"))
	lines := strings.Split(string(status), "\n")
	return len(lines) > statusLine && lines[0] == pid && strings.TrimSpace(lines[statusLine]) == "ready"
}

// halt signals PostgreSQL and waits until it is gone. s.mu is held.
func (s *Server) halt(ctx context.Context, signal string) error {
	if _, err := s.janitor.ask("signal", signal); err != nil {
		return err
	}
	return s.poll(ctx, func(reply string) (bool, error) { return reply == "down", nil })
}
