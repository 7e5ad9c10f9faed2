package redisstore

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/outbox-relay/outbox-relay/consumer/store"
)

// Store is a [store.Store] in Redis, made by [New]. It is safe for concurrent use and starts
// nothing.
type Store struct {
	client                     redis.UniversalClient
	prefix                     string
	acquire, complete, release *redis.Script
}

var _ store.Store = (*Store)(nil)

// Options say how a [Store] uses Redis. The zero value is right for most.
type Options struct {
	// Prefix begins every key. Default "inbox:". To change it is to forget all events.
	Prefix string
}

// New returns a store that uses client, which remains the caller's to close. Redis 4.0 or later is
// needed. It panics when client is nil.
func New(client redis.UniversalClient, o Options) *Store {
	if client == nil {
		panic("redisstore: New needs a client")
	}
	s := &Store{client: client, prefix: o.Prefix}
	if s.prefix == "" {
		s.prefix = "inbox:"
	}
	s.acquire, s.complete, s.release = redis.NewScript(acquireScript), redis.NewScript(completeScript), redis.NewScript(releaseScript)
	return s
}

// key is unambiguous because an escaped name holds no colon.
func (s *Store) key(c store.Claim) []string {
	return []string{s.prefix + url.QueryEscape(c.Receiver) + ":" + url.QueryEscape(c.Source) + ":" + c.IdempotencyKey}
}

// acquireScript returns what is kept of a known event, 0 when another claim holds it, and 1 when
// this claim does. The field known distinguishes a known event from one that is held.
const acquireScript = `
local kept = redis.call('HMGET', KEYS[1], 'token', 'known')
if kept[2] then
	return kept[2]
end
if kept[1] and kept[1] ~= ARGV[1] then
	return 0
end
redis.call('HSET', KEYS[1], 'token', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1`

// Acquire implements [store.Store].
func (s *Store) Acquire(ctx context.Context, c store.Claim, lease time.Duration) (store.Acquired, error) {
	reply, err := s.acquire.Run(ctx, s.client, s.key(c), c.Token, milliseconds(lease)).Result()
	if err != nil {
		return store.Acquired{}, fmt.Errorf("ask Redis: %w", err)
	}
	switch reply := reply.(type) {
	case int64:
		return store.Acquired{Claimed: reply == 1}, nil
	case string:
		known := &store.Known{}
		if err := known.UnmarshalText([]byte(reply)); err != nil {
			return store.Acquired{}, fmt.Errorf("key %q of Redis: %w", s.key(c)[0], err)
		}
		return store.Acquired{Known: known}, nil
	}
	return store.Acquired{}, fmt.Errorf("ask Redis: unexpected reply of type %T", reply)
}

// completeScript returns 0 when the event is another claim's. The token stays, so that the command
// can be repeated.
const completeScript = `
local token = redis.call('HGET', KEYS[1], 'token')
if token and token ~= ARGV[1] then
	return 0
end
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'known', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1`

// Complete implements [store.Store].
func (s *Store) Complete(ctx context.Context, c store.Claim, known store.Known, ttl time.Duration) error {
	text, err := known.MarshalText()
	if err != nil {
		return err
	}
	done, err := s.complete.Run(ctx, s.client, s.key(c), c.Token, milliseconds(ttl), text).Int()
	switch {
	case err != nil:
		return fmt.Errorf("write to Redis: %w", err)
	case done == 0:
		return store.ErrLeaseLost
	}
	return nil
}

// releaseScript removes the event while it is held by this claim, and not once it is known.
const releaseScript = `
local kept = redis.call('HMGET', KEYS[1], 'token', 'known')
if kept[1] == ARGV[1] and not kept[2] then
	redis.call('DEL', KEYS[1])
end
return 1`

// Release implements [store.Store].
func (s *Store) Release(ctx context.Context, c store.Claim) error {
	if err := s.release.Run(ctx, s.client, s.key(c), c.Token).Err(); err != nil {
		return fmt.Errorf("write to Redis: %w", err)
	}
	return nil
}

// milliseconds is how Redis counts. A time to live of 0 would remove the key at once.
func milliseconds(d time.Duration) int64 { return max(1, d.Milliseconds()) }

// Check reports whether Redis may evict what is remembered: call it at start, and do not start on
// an error. It reads INFO of every master and needs no right to change anything.
func (s *Store) Check(ctx context.Context) error {
	check := func(ctx context.Context, node redis.Cmdable) error {
		text, err := node.Info(ctx, "memory").Result()
		if err != nil {
			return fmt.Errorf("read INFO memory: %w", err)
		}
		limit, policy := field(text, "maxmemory"), field(text, "maxmemory_policy")
		switch {
		case limit == "" || policy == "":
			return errors.New("read INFO memory: Redis does not report maxmemory and its policy; make sure that nothing is evicted")
		case limit != "0" && policy != "noeviction":
			return fmt.Errorf("redis evicts keys at %s bytes (maxmemory-policy %s), and every evicted event is processed again when it is "+
				"sent again: set maxmemory-policy noeviction", limit, policy)
		}
		return nil
	}
	if cluster, ok := s.client.(*redis.ClusterClient); ok {
		return cluster.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error { return check(ctx, node) })
	}
	return check(ctx, s.client)
}

// field returns a field of INFO.
func field(info, name string) string {
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
