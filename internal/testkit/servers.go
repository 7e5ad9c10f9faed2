package testkit

import (
	"context"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/localserver"
)

// Servers starts servers of one kind for the tests of a package: one that most tests share, and
// others for a test alone. Its methods are safe for concurrent use.
type Servers struct {
	Need    func(t testing.TB)                            // ends t when a program is missing, and says how to install it
	Command func(dir string, settings ...string) []string // starts one that listens on the socket in dir

	once   sync.Once
	shared *localserver.Server
	err    error
	tests  atomic.Int64
}

// Main is the body of TestMain.
func (s *Servers) Main(m *testing.M) {
	m.Run()
	if s.shared != nil {
		if err := s.shared.Stop(); err != nil {
			panic(err)
		}
	}
}

func (s *Servers) start(ctx context.Context, settings ...string) (*localserver.Server, error) {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	return localserver.Start(ctx, func(dir string) []string { return s.Command(dir, settings...) })
}

// Alone starts a server for t alone, with more settings.
func (s *Servers) Alone(t testing.TB, settings ...string) *localserver.Server {
	t.Helper()
	s.Need(t)
	server, err := s.start(t.Context(), settings...)
	Must(t, err)
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	return server
}

// Shared returns the server that other tests use too, and a name for what t alone has in it.
func (s *Servers) Shared(t testing.TB) (server *localserver.Server, name string) {
	t.Helper()
	s.Need(t)
	s.once.Do(func() { s.shared, s.err = s.start(context.Background()) })
	Must(t, s.err)
	return s.shared, "test" + strconv.FormatInt(s.tests.Add(1), 10)
}

// Restart starts a server again that was killed.
func Restart(t testing.TB, server *localserver.Server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	Must(t, server.Restart(ctx))
}
