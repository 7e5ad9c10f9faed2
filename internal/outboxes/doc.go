// Package outboxes runs an engine for each of several outboxes in one process. All have the same
// destinations and routes. No outbox waits for another one: each has its own connections, claimer
// and lanes.
package outboxes
