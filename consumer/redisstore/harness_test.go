package redisstore_test

import (
	"os/exec"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/outbox-relay/outbox-relay/consumer/redisstore"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/consumer/storetest"
	"github.com/outbox-relay/outbox-relay/internal/localserver"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// servers are Redis servers that keep every acknowledged write, unless their settings say
// otherwise.
var servers = testkit.Servers{
	Need: func(t testing.TB) {
		if _, err := exec.LookPath("redis-server"); err != nil {
			t.Fatal("these tests need a Redis server; install one: apt-get install redis-server")
		}
	},
	Command: func(dir string, settings ...string) []string {
		return append([]string{
			"redis-server", "--port", "0", "--unixsocket", "socket", "--dir", dir, "--save", "", "--appendonly", "yes", "--appendfsync", "always",
		}, settings...)
	},
}

func TestMain(m *testing.M) { servers.Main(m) }

// common is a Redis that other tests use too, and a prefix for t alone.
func common(t testing.TB) (*localserver.Server, redisstore.Options) {
	t.Helper()
	s, name := servers.Shared(t)
	return s, redisstore.Options{Prefix: name + ":"}
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
		Open:  func() store.Store { return redisstore.New(client(t, s), o) },
		Stop:  s.Kill,
		Start: func() { testkit.Restart(t, s) },
	}
}
