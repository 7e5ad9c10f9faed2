package redisstore

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
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
	return []string{s.prefix + url.QueryEscape(c.Receiver) + ":" + url.QueryEscape(c.Source) + ":" + c.Key}
}

// acquireScript returns what is kept of a known event, an empty list when another claim holds it,
// and 1 when this claim does. The field status distinguishes a known event from one that is held.
const acquireScript = `
local kept = redis.call('HMGET', KEYS[1], 'token', 'status', 'hash', 'destination')
if kept[2] then
	return {kept[2], kept[3], kept[4]}
end
if kept[1] and kept[1] ~= ARGV[1] then
	return {}
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
		return store.Acquired{Claimed: true}, nil
	case []any:
		if len(reply) == 0 {
			return store.Acquired{}, nil
		}
		known, err := readKnown(reply)
		if err != nil {
			return store.Acquired{}, fmt.Errorf("read what Redis keeps under %q: %w", s.key(c)[0], err)
		}
		return store.Acquired{Known: known}, nil
	}
	return store.Acquired{}, fmt.Errorf("ask Redis: unexpected reply of type %T", reply)
}

// readKnown reads status, hash and destination.
func readKnown(reply []any) (*store.Known, error) {
	var fields [3]string
	for i := range fields {
		text, ok := reply[i].(string)
		if !ok {
			return nil, errors.New("a field is missing")
		}
		fields[i] = text
	}
	known := &store.Known{Destination: fields[2]}
	if copy(known.Hash[:], fields[1]) != len(known.Hash) {
		return nil, errors.New("the hash is too short")
	}
	var err error
	if known.Status, err = strconv.Atoi(fields[0]); err != nil {
		return nil, fmt.Errorf("read status: %w", err)
	}
	return known, nil
}

// completeScript returns 0 when the event is another claim's. The token stays, so that the command
// can be repeated.
const completeScript = `
local token = redis.call('HGET', KEYS[1], 'token')
if token and token ~= ARGV[1] then
	return 0
end
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'status', ARGV[3], 'hash', ARGV[4], 'destination', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1`

// Complete implements [store.Store].
func (s *Store) Complete(ctx context.Context, c store.Claim, status int, ttl time.Duration) error {
	done, err := s.complete.Run(ctx, s.client, s.key(c),
		c.Token, milliseconds(ttl), status, string(c.Hash[:]), c.Destination).Int()
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
local kept = redis.call('HMGET', KEYS[1], 'token', 'status')
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
