// Package relay moves committed events to their destinations: it claims due deliveries, POSTs them, and settles what
// became of them.
//
//	                      ┌──────── retry: pending again, later ────────┐
//	                      ▼                                             │
//	enqueue ──▶ pending ──claim──▶ pending, leased ──POST──▶ outcome ───┼──▶ delivered
//	               ▲                   │      │                         │
//	               └── rescue, hold ───┘      └── nothing sent: hold    └──▶ failed ──▶ alert
//
// The files, in reading order. The way of a delivery: config.go (settings), relay.go (what runs, and how it stops),
// claim.go (when to claim, for which lanes), lane.go and position.go (what a lane holds, and how far it has looked),
// order.go (runs of an ordering key), deliver.go (one POST), request.go, wire.go and cloudevents.go (what it says),
// transport.go, tls.go and egress.go (how it travels, and where it may not), outcome.go (what a response means), excerpt.go
// and mask.go (what is kept of it, and what never), flow.go
// (how much a receiver bears), breaker.go and hold.go (what to do when it is down), retry.go and horizon.go (when to try
// again, and until when), settle.go (writing outcomes), settle_aside.go (those that cannot be written), resettle.go (those
// that a crash of the server lost), claim_apart.go (claiming around damaged data).
//
// Around it: session.go (being alive, taking over from the dead), orphan.go (claims whose acknowledgement was lost), suspect.go
// (deliveries that may kill their relay), db.go and trouble.go (how statements reach the
// database, and what their errors mean), guard.go and identity.go (keeping away from copies of the database), wake.go
// (waking up, being idle), routes.go, reload.go and difference.go (making database and lanes those of the
// configuration), maintain.go (what is done now and then), chores.go (over one connection), archive.go (moving and
// removing what is done with), watch.go (being a good neighbour), undelivered.go (finding events without deliveries),
// alert*.go (telling people), ops*.go (what operators ask and do), hooks.go (observing), and store*.go: all SQL.
//
// # Goroutines
//
// Run starts, and awaits, one of each of these, and one sender per POST in flight:
//
//	claimer   owns the lanes' positions: waits for a wake-up, claims for every lane with room, hands out, takes turns
//	          with destinations that are held
//	senders   take a run from their lane, POST it, pass the verdicts on; they end when the lane is empty
//	settler   collects verdicts and writes them in batches; only then is a lane's room free again
//	session   one connection: holds the lock that says this relay lives, beats, listens, finds the dead, hears what the
//	          other relays decided about destinations
//	alerter   sends what is due from outbox_alert, each channel on its own, so that a dead one delays nothing
//	cron      the safety tick that wakes the claimer, maintenance, and looking around
//
// # Destinations that are down
//
// A lane's breaker is closed, open or half-open. What opened it, when it may be tried and who tries it stand in
// outbox_destination, which every claim asks: while it is open nobody claims, while it is half-open only its owner does.
// The evidence of all relays is there, too: failures that were answered, less what answers took back. A failure in which
// the receiver was not reached needs no more of it. The claimer writes what the senders' verdicts have decided, and tries
// again as long as the database does not take it; the session reads what others have written, about once a second. A trial begins with one delivery at a time, then two,
// four, …, and ends when the lane has all it may have, or when everything that waited has been looked at and sent. A trial
// that finds nothing to send ends, too. A relay that dies or stops leaves its trials to the others.
//
// # Guarantees
//
// A delivery is POSTed at least once after its event commits. Between claim and settle it is leased; the fence, a
// number that grows with every claim, stands in the WHERE of every settle, so that a relay that was thought dead cannot
// overwrite what its successor wrote. What the first claim promises the receiver, X-Outbox-Not-After, holds for every
// later request; a delivery that is still pending when it ends is failed instead of sent. Times in the database are the database's; the relay's clock only measures.
package relay
