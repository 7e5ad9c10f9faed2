// Package reconcile is what both sides of a reconciliation share, and the receiver's side of it:
// what a receiver holds of one sender, in digests of ranges of idempotency keys.
//
//	wire.go      questions and answers
//	digest.go    counts and sums of keyed hashes, for ranges of keys
//	receiver.go  answers the questions from the receiver's tables
//	store.go     the statements
//
// The package compare below it asks, and compares with the outbox. Receivers import this package,
// so it needs the standard library and pgx alone. Nothing here reads a payload, and nothing writes.
package reconcile
