// Package waiting keeps deliveries that wait behind the head of their ordering key out of the index
// of what is due, so that no claim reads past them, however many they are.
//
// A delivery waits while outbox_delivery.blocked_by names an event. A claim that finds a delivery
// behind a head that has failed, is parked or is retried later reports it, and [Keeper] writes
// blocked_by of it and of what follows it. The rule that keeps everything moving: the first pending
// delivery of a key is never marked, unless a failed or parked one blocks it. So a claim releases
// what it takes and the next delivery of the key (claim/store_keys.go), and a discard releases the
// first that is left ([Release]).
//
// A relay may die, or a row may be locked, between the end of a head and the release. Therefore the
// keeper looks through the heads now and then, and whenever an operator or a rescue asks for a
// sweep, and releases what waits behind a head that holds no longer.
package waiting
