// Package intake takes new events from the outbox by the difference of two snapshots. See
// docs/decisions/0069-intake-by-snapshot-difference.md.
//
// # Idea
//
// A producer writes one row, with the id of its transaction, and no delivery. A relay remembers the
// snapshot up to which all relays have come, the base. The new events are those that its own
// snapshot, the target, sees and the base does not:
//
//	new = { e : visible(e.xid, target) and not visible(e.xid, base) }
//
// Two index ranges of (xid, id) hold them: the transactions from xmax(base) to xmax(target), and
// the few that were open at base and have ended since. The target is the base of the next take.
//
// # Late commits need no mechanism
//
// A transaction that is open at a take is in no difference, and holds nothing up: the next base
// says that it was open. When it has committed, its events are in the difference of the next take,
// however old their ids are. When it has rolled back, there are none. A prepared transaction is an
// open one; a savepoint belongs to its transaction.
//
// # A range
//
//	nothing new ──▶ no row is written
//
//	               ┌── SettleRanges: rows of some deliveries ──┐
//	               ▼                                           │
//	TakeRange ──▶ taken ───────────────────────────────────────┴──▶ ended ──▶ PruneRanges
//	               ▲ │                         (each delivery has a row)
//	               └─┘ RescueRange: another relay, another fence
//
// A row of outbox_range is a range. The last row is the progress of all relays. Its primary key is
// the only lock: a relay takes by inserting the next number in the statement that reads the events.
// Of several relays that try at once one succeeds. The others find [Beaten], at the latest when
// lock_timeout ends, if the answer of the first is still on its way.
//
// A difference that does not fit the [Terms] is cut by id. Its ranges have the same base and
// target, each begins where the one before ends, and the last one has no More. It is never cut by
// xid: a transaction with an older xid may insert an event of a key after one with a younger xid
// has committed. So, of two events of a key, the one that was committed before the other was
// inserted is in the same range or an earlier one.
//
// The relay routes the events in memory ([Routes]), refuses those that break a rule ([BrokenRule]),
// sends them, and writes each delivery once, when its outcome is known ([SettleRanges]). What is
// not sent within about a second it writes as pending, and one whose attempt is still in flight as
// claimed: both then live on as any delivery, and the range ends. Ranges must end soon: each take
// reads the ranges from the oldest open one on.
//
// # A crash
//
// A relay that dies leaves open ranges. Any relay may take one over once the dead one is no longer
// registered in outbox_relay: it reads the events again by their bounds, less the destinations that
// have a row ([RescueRange]). The same call finds what this relay has taken without learning of it,
// when the answer of a take was lost. The fence of the range changes, so that the former owner,
// should it live, can write no more.
//
// A settle names its ranges by number, relay and fence, and locks them. After a failover to a
// standby that lost the last transactions, numbers and ids of events are given out again, but no
// fence, which grows with the clock. Progress is lost together with the events that came after it,
// so that it needs no repair.
//
// # Foreign ids
//
// Transaction ids mean something on one server. In a restored dump, or behind logical replication,
// an event may be "visible in base" or "not begun yet" for years, and no take would find it,
// without an error. [CheckOrigin] refuses with a [ForeignError], and [Rebase] begins again: each
// event that may not be settled becomes pending.
package intake
