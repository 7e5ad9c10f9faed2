package redisstore_test

import (
	"context"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/outbox-relay/outbox-relay/consumer/redisstore"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/consumer/storetest"
	"github.com/outbox-relay/outbox-relay/internal/localserver"
)

// patience ends a test that would hang. No assertion depends on it.
const patience = time.Minute

// shared is the server of all tests that leave it running.
var shared struct {
	once   sync.Once
	server *localserver.Server
	err    error
	tests  atomic.Int64
}

func TestMain(m *testing.M) {
	code := m.Run()
	if shared.server != nil {
		if err := shared.server.Stop(); err != nil {
			panic(err)
		}
	}
	os.Exit(code)
}

// start runs a Redis server that keeps every acknowledged write, with more settings or others.
func start(ctx context.Context, settings ...string) (*localserver.Server, error) {
	return localserver.Start(ctx, func(dir string) []string {
		return append([]string{
			"redis-server", "--port", "0", "--unixsocket", "socket", "--dir", dir, "--save", "", "--appendonly", "yes", "--appendfsync", "always",
		}, settings...)
	})
}

func needRedis(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		t.Fatal("these tests need a Redis server; install one: apt-get install redis-server")
	}
}

// server is a Redis for t alone.
func server(t testing.TB, settings ...string) *localserver.Server {
	t.Helper()
	needRedis(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := start(ctx, settings...)
	must(t, err)
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// common is a Redis that other tests use too, and a prefix for t alone.
func common(t testing.TB) (*localserver.Server, redisstore.Options) {
	t.Helper()
	needRedis(t)
	shared.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		shared.server, shared.err = start(ctx)
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.server, redisstore.Options{Prefix: "test" + strconv.FormatInt(shared.tests.Add(1), 10) + ":"}
}

// client connects to a server until t ends.
func client(t testing.TB, s *localserver.Server) *redis.Client {
	c := redis.NewClient(&redis.Options{Network: "unix", Addr: s.Socket(), ContextTimeoutEnabled: true})
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// memory is what the receivers of one test share.
func memory(t testing.TB, s *localserver.Server, o redisstore.Options) storetest.Memory {
	return storetest.Memory{
		Open: func() store.Store { return redisstore.New(client(t, s), o) },
		Stop: s.Kill,
		Start: func() {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			must(t, s.Restart(ctx))
		},
	}
}

// must ends the test when err is not nil.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
