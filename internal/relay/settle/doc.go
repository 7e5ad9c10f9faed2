// Package settle writes what became of deliveries. A [Settlement] goes in: a delivery with its
// outcome. A [Settler] collects settlements into batches and writes each batch in one round trip.
// What the database has taken comes out through Written.
//
//	settler.go               collects batches, and repeats them while the database is away
//	aside.go                 settlements that could not be written: their row is locked, or the database refuses them
//	ranges.go                deliveries in hand, which have no row until they are settled
//	recent.go                settlements that a crash of the server may undo
//	settlement.go            what is written together, and by which statement
//	store.go, store_ranges.go  all SQL
//
// # Fences
//
// Each statement names the fence of the claim, or of the range, under which this relay sent the
// delivery. If another relay has claimed it since, the statement changes nothing, and the
// settlement counts as stale.
//
// # Batches
//
// A batch is one transaction. It does not wait for the disk unless a delivery of it failed: losing
// another outcome in a crash of the server costs a duplicate at most, and usually nothing, since
// [Settler.WriteAgain] repeats the last ones. A batch that is refused is written in parts, by
// outcome and destination and then one by one, or by range if it met a lock, so that one row cannot
// keep the others from being written. What is left is set aside and tried again: until another
// session unlocks the row, or until the lease ends. What has no row is tried until it has one.
//
// # Ranges
//
// The deliveries of a range have no rows. The settlement of one inserts its row, and the last one
// ends the range. After [RowsAfter] what is left gets rows, claimed by this relay, and the range
// ends. When a delivery with an ordering key becomes pending, the earlier ones of the key get rows
// in the same transaction: otherwise another relay could claim the later one.
package settle
