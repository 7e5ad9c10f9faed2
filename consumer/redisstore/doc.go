// Package redisstore remembers in Redis which events a receiver has processed, for handlers whose
// effect is not in PostgreSQL:
//
//	events := redisstore.New(client, redisstore.Options{}) // a *redis.Client, *redis.ClusterClient or failover client
//	if err := events.Check(ctx); err != nil {
//		return err // Redis may evict what is remembered
//	}
//	receive, err := store.Middleware(events, store.Config{Config: consumer.Config{Receiver: "logistics", Secrets: secrets, Source: "finance"}})
//	mux.Handle("POST /webhooks/finance", receive(handler))
//
// An event is one key, prefix + source + ":" + idempotency key, with a time to live: the lease
// while a handler runs, the TTL afterwards. Each step is one script on that key, so it works on a
// cluster. Redis' clock decides alone.
//
// # What is promised
//
// While Redis keeps what it has acknowledged: an event has one handler at a time, as long as the
// handler obeys its context and its process does not stall beyond the lease; a processed event is a
// duplicate for the TTL, whichever process asks; a handler that has lost its lease overwrites
// nothing. When Redis does not answer, no handler runs.
//
// # What is not promised
//
//   - The effect and the memory of it are not one. When the process dies between them, or Redis
//     stays away until CommitTimeout has passed, the effect happens again with the next request
//     after the lease.
//   - Redis may forget what it has acknowledged, and a forgotten event is processed again. Without
//     persistence a restart forgets everything; with appendfsync everysec a crash of the machine
//     forgets about a second; with a snapshot all since the last one; with appendfsync always
//     nothing. A failover forgets what the replica had not received: replication is asynchronous,
//     and neither WAIT nor min-replicas-to-write makes it otherwise, they narrow the gap.
//   - An eviction is such a forgetting. Every key of this package has a time to live, so the
//     policies that begin with volatile evict it as well: set maxmemory-policy noeviction, so that
//     a full Redis refuses (503, the relay retries) and does not forget. [Store.Check] checks that.
//   - FLUSHALL, a restored snapshot and a changed [Options].Prefix forget too. store.Middleware
//     refuses events that are older than the TTL, but cannot know that younger ones were lost.
//   - A clock of the Redis machine that jumps forwards ends leases and memories early.
//   - There is no order between events, no inbox mode, no record of failures, and no SQL to inspect
//     what happened.
//
// Where any of this would cost money, let the effect be a row in PostgreSQL and use
// consumer.Middleware.
//
// # Setting up the client
//
// Set ContextTimeoutEnabled, so that a client that hangs up ends its request, and keep ReadTimeout
// well below the lease. Retries of the client are harmless: each request's claim has its own token,
// by which a repeated command is recognised.
package redisstore
