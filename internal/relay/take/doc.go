// Package take brings new events into a relay: it takes ranges of them, routes them, and hands them
// to the lanes. What these cannot send soon becomes a row. It also takes over ranges that no relay
// has in hand. Package intake has the statements.
//
//	take.go                 one take, and how its deliveries are handed out
//	spread.go, schedule.go  the deliveries of a range; which of them join their ordering key later
//	targets.go              the destinations as a range finds them
//	keys_elsewhere.go       ordering keys that another relay has in hand
//	rescue.go               ranges that no relay has in hand
//	beyond.go               events that came after a difference that is taken in pieces
//	store.go                routes, and destinations that are closed to this relay
package take
