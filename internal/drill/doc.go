// Package drill tries a receiver as the real world does: it sends what relays, networks and
// attackers send, and reports what the receiver does wrong, in words for its author. It sends to
// receivers for tests only.
//
// [Run] works along one table, in table.go. Each row is a [Check]: what is sent, what must come of
// it, and what to do otherwise. The rows' functions are beside those of their kind: duplicates.go,
// signatures.go and requests.go. drill.go runs them, event.go makes and signs requests, send.go
// sends them whole or in pieces, and effects.go asks the probe what they have caused.
package drill
