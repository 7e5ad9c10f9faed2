package redisstore_test

import (
	"context"
	"crypto/rand"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/outbox-relay/outbox-relay/consumer/redisstore"
	"github.com/outbox-relay/outbox-relay/consumer/store"
	"github.com/outbox-relay/outbox-relay/consumer/storetest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	storetest.Run(t, storetest.Subject{
		SurvivesRestart: true,
		New: func(t testing.TB) storetest.Memory {
			s, o := common(t)
			return memory(t, s, o)
		},
		NewServer: func(t testing.TB) storetest.Memory { return memory(t, servers.Alone(t), redisstore.Options{}) },
	})
}

// A Redis without persistence forgets at a restart, as the documentation says.
func TestConformanceWithoutPersistence(t *testing.T) {
	t.Parallel()
	storetest.Run(t, storetest.Subject{NewServer: func(t testing.TB) storetest.Memory {
		return memory(t, servers.Alone(t, "--appendonly", "no"), redisstore.Options{})
	}})
}

func claim(key string) store.Claim {
	return store.Claim{Receiver: "a b", Source: "fin ance:", IdempotencyKey: key, Token: rand.Text()}
}

// known is what a receiver remembers of an event.
var known = store.Known{Status: 200, Hash: "h"}

func TestKeyAndTimesToLive(t *testing.T) {
	t.Parallel()
	s := servers.Alone(t)
	c := client(t, s)
	kept, ctx := redisstore.New(c, redisstore.Options{}), t.Context()
	const name = "inbox:a+b:fin+ance%3A:a:{b}"
	want := func(what string, most time.Duration) {
		t.Helper()
		if got := c.PTTL(ctx, name).Val(); got <= most/2 || got > most {
			t.Errorf("%s: the time to live is %v, want %v", what, got, most)
		}
	}
	one := claim("a:{b}")
	if got, err := kept.Acquire(ctx, one, time.Hour); err != nil || !got.Claimed {
		t.Fatalf("%+v, %v", got, err)
	}
	want("claimed", time.Hour)
	testkit.Must(t, kept.Complete(ctx, one, known, 7*24*time.Hour))
	want("completed", 7*24*time.Hour)
	if got, err := kept.Acquire(ctx, claim("a:{b}"), time.Hour); err != nil || got.Known == nil {
		t.Fatalf("%+v, %v", got, err)
	}
	want("asked for again", 7*24*time.Hour)
}

// Redis forgets scripts at a restart or a failover. The client then sends them again.
func TestForgottenScripts(t *testing.T) {
	t.Parallel()
	s := servers.Alone(t)
	c := client(t, s)
	kept, ctx, one := redisstore.New(c, redisstore.Options{}), t.Context(), claim("k")
	flush := func() {
		t.Helper()
		testkit.Must(t, c.ScriptFlush(ctx).Err())
	}
	for range 2 {
		flush()
		if got, err := kept.Acquire(ctx, one, time.Hour); err != nil || !got.Claimed {
			t.Fatalf("%+v, %v", got, err)
		}
		flush()
		testkit.Must(t, kept.Release(ctx, one))
		flush()
	}
	testkit.Must(t, kept.Complete(ctx, one, known, time.Hour))
}

// What is not this package's must not be taken for an event, new or known.
func TestKeysOfOthers(t *testing.T) {
	t.Parallel()
	s, o := common(t)
	c := client(t, s)
	kept, ctx := redisstore.New(c, o), t.Context()
	for name, put := range map[string]func(key string) error{
		"a text":       func(key string) error { return c.Set(ctx, key, "x", 0).Err() },
		"an odd field": func(key string) error { return c.HSet(ctx, key, "token", "t", "known", "x").Err() },
	} {
		testkit.Must(t, put(o.Prefix+"a+b:fin+ance%3A:"+name))
		if got, err := kept.Acquire(ctx, claim(name), time.Hour); err == nil {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// A cluster refuses scripts that touch more than the key they name.
func TestCluster(t *testing.T) {
	t.Parallel()
	s := servers.Alone(t, "--cluster-enabled", "yes")
	testkit.Must(t, client(t, s).ClusterAddSlotsRange(t.Context(), 0, 16383).Err())
	cluster := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: []string{"node:1"},
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{{Start: 0, End: 16383, Nodes: []redis.ClusterNode{{Addr: "node:1"}}}}, nil
		},
		Dialer: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", s.Socket())
		},
	})
	t.Cleanup(func() { cluster.Close() })
	testkit.Eventually(t, "a cluster that serves", func() bool { return strings.Contains(cluster.ClusterInfo(t.Context()).Val(), "cluster_state:ok") })
	var n atomic.Int32 // the cases run in parallel
	storetest.Run(t, storetest.Subject{New: func(testing.TB) storetest.Memory {
		o := redisstore.Options{Prefix: strings.Repeat("x", int(n.Add(1)))}
		return storetest.Memory{Open: func() store.Store { return redisstore.New(cluster, o) }}
	}})
	if err := redisstore.New(cluster, redisstore.Options{}).Check(t.Context()); err != nil {
		t.Errorf("check: %v", err)
	}
}

func TestCheckFindsEviction(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		limit, policy string
		sound         bool
	}{
		{"0", "noeviction", true},
		{"0", "allkeys-lru", true}, // without a limit nothing is evicted
		{"100mb", "noeviction", true},
		{"100mb", "allkeys-lru", false},
		{"100mb", "volatile-ttl", false},
	} {
		s := servers.Alone(t, "--maxmemory", c.limit, "--maxmemory-policy", c.policy)
		err := redisstore.New(client(t, s), redisstore.Options{}).Check(t.Context())
		if (err == nil) != c.sound || err != nil && !strings.Contains(err.Error(), "set maxmemory-policy noeviction") {
			t.Errorf("maxmemory %s, %s: %v", c.limit, c.policy, err)
		}
		s.Kill()
		if err := redisstore.New(client(t, s), redisstore.Options{}).Check(t.Context()); err == nil {
			t.Error("a server that is away passes the check")
		}
	}
}

// A Redis that is full refuses: the handler must not run for an event that cannot be remembered.
func TestFullRedisRefuses(t *testing.T) {
	t.Parallel()
	s := servers.Alone(t, "--maxmemory-policy", "noeviction")
	c := client(t, s)
	kept := redisstore.New(c, redisstore.Options{})
	testkit.Must(t, c.ConfigSet(t.Context(), "maxmemory", "1").Err())
	if got, err := kept.Acquire(t.Context(), claim("k"), time.Hour); err == nil {
		t.Errorf("acquired %+v", got)
	}
}

func TestNewNeedsAClient(t *testing.T) {
	t.Parallel()
	defer func() {
		if message, _ := recover().(string); !strings.Contains(message, "needs a client") {
			t.Errorf("panic %q", message)
		}
	}()
	redisstore.New(nil, redisstore.Options{})
}
