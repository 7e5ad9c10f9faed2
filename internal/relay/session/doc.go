// Package session is a relay's standing in its database: its connections, with and without a pooler
// in between (connect.go), its registration, heartbeat and notifications (session.go), which relays
// are dead, and what becomes of their claims (dead.go, store_dead.go), and what remains of a relay
// that has had nothing to do for long: who beats and listens for it (asleep.go, sleepers.go). It
// knows nothing of deliveries: what a relay has to do when it enters, beats or is notified, it
// gives a [Session] as functions.
package session
