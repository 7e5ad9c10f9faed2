// Package relay moves committed events to their destinations: it claims due deliveries, POSTs them, and settles what
// became of them.
//
//	                      ┌──────── retry: pending again, later ────────┐
//	                      ▼                                             │
//	enqueue ──▶ pending ──claim──▶ pending, leased ──POST──▶ outcome ───┼──▶ delivered
//	               ▲                   │      │                         │
//	               └── rescue, hold ───┘      └── nothing sent: hold    └──▶ failed ──▶ alert
//
// The files, in reading order: config.go (settings), relay.go (what runs, and how it stops), claim.go (when to claim,
// for which lanes), lane.go and position.go (what a lane holds, and how far it has looked), deliver.go (one POST),
// request.go (what it says), transport.go and egress.go (how it travels, and where it may not), outcome.go (what a
// response means), retry.go (when to try again), settle.go (writing outcomes), session.go (being alive, taking over from
// the dead), guard.go and identity.go (keeping away from copies of the database), wake.go (waking up, being idle), maintain.go (safety tick, parked deliveries), archive.go (moving and
// removing what is done with), alert.go (telling people), routes.go (making the database's routes those of the
// configuration), reload.go (another configuration while running), store*.go (all SQL), ops.go (what operators ask), hooks.go (observing).
//
// # Goroutines
//
// Run starts, and awaits, one of each of these, and one sender per POST in flight:
//
//	claimer   owns the lanes' positions: waits for a wake-up, claims for every lane with room, hands out
//	senders   take a delivery from their lane, POST it, pass the verdict on; they end when the lane is empty
//	settler   collects verdicts and writes them in batches; only then is a lane's room free again
//	session   one connection: holds the lock that says this relay lives, beats, listens, finds the dead
//	alerter   sends what is due from outbox_alert, so that a dead channel delays no delivery
//	cron      the safety tick that wakes the claimer, and maintenance
//
// # Guarantees
//
// A delivery is POSTed at least once after its event commits. Between claim and settle it is leased; the fence, a
// number that grows with every claim, stands in the WHERE of every settle, so that a relay that was thought dead cannot
// overwrite what its successor wrote. Times in the database are the database's; the relay's clock only measures.
package relay
