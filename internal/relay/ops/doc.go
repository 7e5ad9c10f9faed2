// Package ops is everything that an operator asks of an outbox, or does to it. The commands of
// outbox-relay call only this. It needs a database and no running relay, and it never imports
// package relay.
//
// Which file answers which question:
//
//	ops.go                the entry, [Outbox]; schema and identity of the database: answered by the rooms below
//	status.go             how much waits, where, and for how long? which relays live, and which alerts are open?
//	advice.go             what is wrong, and which commands come next?
//	doctor.go             what is wrong with the server, the schema and the way to the destinations?
//	event.go              which event is meant, and what became of it?
//	deliveries.go         which deliveries match a filter? what happened to this event? what blocks this ordering key?
//	wait.go               why has this delivery not been sent yet?
//	bulk.go               replay, retry, discard, and their previews: what they change
//	walk.go               how they find it, in batches
//	audit.go              who did what; payloads, which are revealed to those whom it names
//	store_destination.go  pause and resume; which destinations are there?
//	store_routes.go       which routes are stored, and which does this event type take?
//	store_route_state.go  has a relay taken an event? which ones has none taken?
//	store_undelivered.go  which events have no delivery? create what is missing
//
// store*.go is all SQL, each statement above the method that runs it. The last three files are
// little else.
//
// A change that an operator orders is durable when it returns, and notifies the relays. No
// statement depends on how much was delivered in the past.
package ops
