// Package relay moves committed events to their destinations. It takes new events from the outbox,
// sends each delivery, and settles what became of it. Deliveries that wait are rows of
// outbox_delivery, which it claims when they are due.
//
//	         take, route                                       settle
//	outbox ──────────────▶ in hand ──┬──────────▶ POST ──▶ outcome ──▶ delivered | failed ──▶ alert
//	                                 │             ▲           │
//	            set aside, 1 s old   │             │           │ retry, hold
//	                                 ▼             │           ▼
//	                              pending ──claim──┘◀──────────┘
//
// A delivery in hand has no row. It gets one with its outcome, or after about a second, or when it
// must wait: its destination is paused or down, another delivery of its ordering key comes first,
// or its lane is full. From then on it is claimed as any pending delivery.
//
// The files, from the top down:
//
//	relay.go                  what each part gets; what runs, and how it stops
//	claimer.go, mailbox.go    the claimer: its turns, and what others post to it
//	maintain.go               periodic work
//	reload.go, difference.go  another configuration while it runs, and its routes
//	session.go                what the session makes the relay do
//	settled.go                what written outcomes change in the lanes
//	breaker.go                writing what the breakers decide
//	state.go                  what the relay knows of itself
//	error_log.go              errors that repeat are logged once in a while
//	signals.go                signals between goroutines
//	config.go, hooks.go       settings, observing
//	store.go                  the statements of this package
//
// The rooms in internal/relay never import this package. On an event's way: intake (new events by
// the difference of two snapshots), take (takes a range, routes it, hands it out), lane (what each
// destination has in this relay and may send), send (attempts), post (one request; batchpost,
// natspost and kafkapost beside it), settle (writing outcomes), claim (rows that are due), join
// (events that join their ordering key when they are due), waiting (what waits behind the head of
// its key). Rules without a database: policy (the outcome of an attempt, when to try again, when a
// receiver is down), capacity (how much a receiver bears), ordering (what of an ordering key may be
// sent), agenda (when the claimer acts). Around them: session (connection, heartbeats, and the
// claims of dead relays), identity (keeping away from copies of the database), breaker (what relays
// share about destinations that are down), routes (the stored routes, and what was parked before
// its route came), archive, alert, history, spans, and watch (the state of the database). Package
// ops (what operators ask and do) uses the same rooms; it and relay never import each other.
//
// # Who may import what
//
// This package is what a program imports to run a relay within itself. Its API may change in each
// minor version of v1, because the product is the program outbox-relay: pin the version that you
// have tested. names.go has the names of all that a [Config] and its [Hooks] hold. The rooms in
// internal/relay are for this repository alone: for the engine, and some of them (ops, alert,
// watch, history, identity, archive, policy, post, natspost, session) for the command line, the
// page and the metrics too.
//
// # When the claimer acts
//
// The claimer does what its [agenda.Agenda] says is due, one turn after the other. All that wants a
// turn registers a cause there: the pace of takes, retries, breakers, what a take or a claim has
// left, and other goroutines through the mailbox. docs/architecture.md lists the causes. At debug
// level each turn logs its own, and the next one.
//
// # Goroutines
//
// Run starts, and awaits, one of each of these, and one sender per POST in flight:
//
//	claimer      takes, claims, hands out, and writes what the breakers decide; it owns the lanes' positions
//	senders      take a run from their lane, POST it, pass the outcomes on; they end when the lane is empty
//	settler      collects outcomes and writes them in batches, and makes rows of what was in hand for too long; it owns the ranges
//	session      one connection: shows by its presence that this relay lives, beats, listens, finds and rescues the dead, and
//	             reads what the relays have decided about destinations; after a loss it writes the last outcomes again
//	alerter      sends what is due from outbox_alert, each channel on its own, so that a dead one delays nothing
//	maintenance  the archive, parked deliveries, and routes that others changed
//	keeper       marks what waits behind the head of its ordering key, and releases it when that has ended
//	watcher      checks the database every half minute, for alerts and for housekeeping
//	readiness    asks destinations of logs, until each was ready once, whether they can store events
//
// # Outcomes
//
// A delivery in hand or claimed ends in one of these, which policy.Decide chooses. Each is written
// by its own statement in package settle, or as a new row by package intake.
//
//	delivered  2xx
//	retry      pending again, later, by the schedule; an attempt is spent
//	hold       pending again, as it was before; no attempt is spent: nothing was sent, or the destination is down
//	fail       failed for good, with an alert; a 410 also pauses the destination
//
// # Ordering keys
//
// The deliveries of a key are sent one after the other. What is in hand goes first, in the order of
// its events; what comes later waits behind it in the lane. When one is not delivered, all that
// follow become pending in or after the transaction that writes it, and before they can be claimed
// everything of the key in hand has a row. Before a range with keys is handed out, the relay asks
// which keys have rows or are in another relay's hand ([intake.FindBlockedKeys]). A delivery that
// waits for another relay's event of its key gets no row meanwhile, so that no relay claims it
// first if this one dies.
//
// # Stopping
//
// What ends Run also ends taking and claiming. What a lane has queued is held. Each POST in flight
// may end until DrainTimeout, and is settled as usual; then it is cut off, which is a retry even
// after the last attempt. The session leaves last: what could not be written by then is given back
// by a row of outbox_void, and ranges that are still open are taken over.
//
// # The main tables and their writers
//
//	outbox                the producer inserts; archive removes
//	outbox_range          takes insert; settles end; rescues change the owner; watch removes
//	outbox_delivery       settles and ops insert; claims, sends, settles, joins, waiting and ops update;
//	                      routes replace what was parked; archive removes
//	outbox_attempt        settles insert; archive removes
//	outbox_destination    breaker, a settle (410), the end of a relay (trials), the search of what is parked, ops
//	outbox_route          routes, at the start, at a reload and at the stop
//	outbox_intake         triggers of the last two count changes, so that a take knows whether to read them again
//	outbox_relay          session; identity, while quarantined; relay, for a refused reload
//	outbox_void           rescues, leaving, lost acknowledgements
//	outbox_alert          settles, breaker, routes, identity, watch, ops; alert marks what is sent
//
// All of that is done as the role outbox_relay, see migrations/roles.sql.
// outbox/security_rights_test.go lists the rights.
//
// # Guarantees
//
// A delivery is POSTed at least once after its event commits. A range belongs to one relay until it
// ends or that relay is dead. A claimed row is leased. The lease ends early when a row of
// outbox_void says so: then the relay has died or left, or never learned of the claim.
//
// The fence is a number that grows with every take and claim, at least as fast as the database's
// clock: even for a take, odd for a claim. Every settle names it in its WHERE, so that a relay that
// was thought dead cannot overwrite what its successor wrote.
//
// What the first request promises the receiver, X-Outbox-Not-After, holds for every later one. A
// delivery that is still pending when the promise ends is failed instead of sent. Times in the
// database are the database's; the relay's clock only measures.
package relay
