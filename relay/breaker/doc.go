// Package breaker keeps what the relays of a database share about destinations that are down, in outbox_destination: the evidence
// against a destination, whether its breaker is open, and which relay tries it (store.go). A [Keeper] writes there what the
// breaker of one relay's lane has decided (keeper.go); the decisions themselves are those of policy.Breaker.
package breaker
