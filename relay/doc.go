// Package relay moves committed events to their destinations: it claims due deliveries, POSTs them, and settles what
// became of them.
//
//	                      ┌──────── retry: pending again, later ────────┐
//	                      ▼                                             │
//	enqueue ──▶ pending ──claim──▶ pending, leased ──POST──▶ outcome ───┼──▶ delivered
//	               ▲                   │      │                         │
//	               └── rescue, hold ───┘      └── not to blame: hold    └──▶ failed ──▶ alert
//
// The files, from the top down: a file uses names of those after it, and hardly any of those before it.
//
//	relay.go                       what runs, and how it stops
//	maintain.go                    what is done now and then
//	reload.go, difference.go       another configuration while it runs, and its routes
//	session.go                     what the session makes the relay do
//	claim.go                       when to claim, and what follows from what was found
//	claim_request.go               what to claim for which lane
//	claim_apart.go                 claiming around damaged data
//	writers.go                     transactions that may commit late
//	breaker.go                     writing what the breakers decide
//	deliver.go, suspect.go         one attempt; deliveries that may kill their relay
//	settle.go, settle_aside.go     writing outcomes; those that cannot be written
//	resettle.go                    outcomes that a crash of the server lost
//	state.go, core.go              what the relay knows of itself; what the parts share
//	lane.go, position.go           a destination's lane, and how far the claimer has looked
//	outgoing.go                    what a lane holds and may send
//	order.go, queue.go             ordering keys; the queues of a lane
//	wake.go                        signals between goroutines
//	config.go, hooks.go            settings, observing
//	store_*.go                     all SQL
//	settlement.go, store.go        what is written of an attempt, and what is claimed
//
// Packages below it never import this package: pg (how statements reach the database, and what their errors mean), policy
// (the outcome of an attempt, when to try again, how much a receiver bears, when it is down, when to look for work), post (one
// request: what it says, how it travels, what is kept of its answer), natspost and kafkapost (the same over JetStream and
// Kafka), spans (traces), breaker (what the relays share about destinations that are down), identity (keeping away from copies
// of the database), session (connection, heartbeats, and the claims of dead relays), routes (the stored routes, and what was
// parked before its route came), archive (moving and removing settled events), alert (alerts and their channels), and watch
// (the state of the database around the relay). Package ops (what operators ask and do) uses the same packages; it and relay
// never import each other.
//
// # Goroutines
//
// Run starts, and awaits, one of each of these, and one sender per POST in flight:
//
//	claimer      owns the lanes' positions: waits for a wake-up, claims for every lane with room, hands out, watches for
//	             transactions that commit late, and writes what the breakers decide
//	senders      take a run from their lane, POST it, pass the outcomes on; they end when the lane is empty
//	settler      collects outcomes and writes them in batches; only then is a lane's room free again
//	session      one connection: shows by its presence that this relay lives, beats, listens, finds and rescues the dead, and
//	             reads what the relays have decided about destinations; after a loss it writes the last outcomes again
//	alerter      sends what is due from outbox_alert, each channel on its own, so that a dead one delays nothing
//	maintenance  the safety tick that wakes the claimer, the archive, parked deliveries, and routes that others changed
//	watcher      looks around the database every half minute, for alerts and for housekeeping
//	readiness    asks destinations of logs, until each was ready once, whether they can store events
//
// # Outcomes
//
// A claim ends in one of these, which policy.Decide chooses. Each is written by a statement of its own in store_settle.go.
//
//	delivered  2xx
//	retry      pending again, later, by the schedule; an attempt is spent
//	hold       pending again, as it was before the claim; no attempt is spent: nothing was sent, or the destination is down
//	fail       failed for good, with an alert; a 410 also pauses the destination
//
// # Stopping
//
// What ends Run also ends claiming. What a lane has queued is held. Each POST in flight may end until DrainTimeout, and is
// settled as usual; then it is cut off, which is a retry even after the last attempt. The session leaves last: what could not
// be written by then is given back by a row of outbox_void.
//
// # Tables and their writers
//
//	outbox                the producer inserts; archive removes
//	outbox_delivery       the trigger outbox_fan_out inserts; claims, settles and ops update; archive removes
//	outbox_attempt        settles insert
//	outbox_destination    breaker, a settle (410), the end of a relay (trials), the search of what is parked, ops
//	outbox_route          routes, at the start, at a reload and at the stop
//	outbox_relay          session
//	outbox_void           rescues, leaving, lost acknowledgements
//	outbox_alert          settles, breaker, routes, identity, watch; alert marks what is sent
//
// All of that is done as the role outbox_relay, see migrations/roles.sql. outbox/security_rights_test.go lists the rights.
//
// # Guarantees
//
// A delivery is POSTed at least once after its event commits. Between claim and settle it is leased. The lease ends early
// when a row of outbox_void says so: then the relay has died or left, or never learned of the claim.
//
// The fence is a number that grows with every claim, at least as fast as the database's clock. It stands in the WHERE of
// every settle, so that a relay that was thought dead cannot overwrite what its successor wrote.
//
// What the first claim promises the receiver, X-Outbox-Not-After, holds for every later request. A delivery that is still
// pending when the promise ends is failed instead of sent. Times in the database are the database's; the relay's clock only
// measures.
package relay
