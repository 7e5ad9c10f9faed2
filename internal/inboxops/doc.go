// Package inboxops is what an operator asks and does at a receiver's database: the events of its
// inboxes (inbox_events) and the memory of its middleware (processed_events). The command
// outbox-relay inbox is its only user.
//
// It never reads payloads, request headers or payload hashes, so the role inbox_support is enough
// for everything but pruning.
//
// Every statement is bounded: it reads at most [lookBatch] rows through an index, in a transaction
// of its own with a statement_timeout. A walk over a large inbox is many such statements.
//
// A change has two steps. [Ops.walk] finds events without locking them, and the change takes only
// what still has the claim and the state that were found. Then the ordering keys of the changed
// events are released under the same lock as in the package consumer, and the workers of the
// receiver are notified.
package inboxops
