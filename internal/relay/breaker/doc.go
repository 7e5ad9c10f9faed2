// Package breaker keeps what the relays of a database share about destinations that are down, in
// outbox_destination: the evidence against a destination, whether its breaker is open, and which
// relay tries it (store.go). A [Keeper] writes there what the breaker of one relay's lane has
// decided (keeper.go); the decisions themselves are those of policy.Breaker.
//
// A lane's breaker is closed, open or half-open. Its state stands in outbox_destination, with the
// error that opened it, the time of the next trial and the relay that makes it. Every claim reads
// that row: while the breaker is open no relay claims for the destination, while it is half-open
// only the owner of the trial does.
//
// The same row holds the evidence of all relays: failed requests that had a connection, less what
// later answers took back. A request that found no connection needs no further evidence: it spends
// no attempt, and opens the breaker unless this relay had an answer within the last second.
//
// The claimer writes what the senders' results have decided, and tries again until the database
// takes it. The session reads what other relays wrote, about once a second. A trial begins with one
// delivery at a time, then two, four, …, and closes the breaker when the lane has all it may have,
// or when everything that waited has been sent. A trial that finds nothing to send closes it too.
// The trials of a relay that dies or stops go to the others.
package breaker
