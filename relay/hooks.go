package relay

import (
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relay/lane"
)

// Hooks observe a relay: metrics hang on them, and tests wait on them. Every field may be nil.
// Hooks run on the relay's own goroutines, several at a time: they must be safe for concurrent use
// and return at once.
type Hooks struct {
	// Claimed follows every claim that found something.
	Claimed func(destination string, deliveries int)
	// ClaimRan follows every claim that the database has made, also one that found nothing, with
	// the deliveries of all destinations and the time that it took.
	ClaimRan func(deliveries int, took time.Duration)
	// Woken follows every wait of the claimer, with what ended it. The causes of each turn are in
	// the log, at level debug.
	Woken func(by Wake)
	// Attempted follows every POST, before its outcome is settled.
	Attempted func(Attempt)
	// Settled follows every batch of outcomes that the database has taken.
	Settled func(destination string, outcome Outcome, reason Reason, deliveries int)
	// SettleRan follows every batch of outcomes that the database has taken, with its size and the
	// time that it took.
	SettleRan func(deliveries int, took time.Duration)
	// StaleSettle follows outcomes that came too late: another relay had claimed the delivery
	// meanwhile.
	StaleSettle func(deliveries int)
	// Rescued follows the end of a dead relay's claims, which other relays may make from then on.
	Rescued func(relayID int32)
	// LaneChanged follows every change of what this relay lets a destination have, at most once a
	// second for each.
	LaneChanged func(LaneState)
	// Idle follows each declaration that this relay has nothing to do.
	Idle func()
	// Archived follows every batch of a retention run, with what that batch moved or removed.
	Archived func(batch Archived)
	// Notified follows every alert that reached a channel, or failed to (err is not nil).
	Notified func(channel string, alert Alert, err error)
	// Watched follows every look around the database, whether this relay took it or another one
	// did.
	Watched func(Watched)
	// Quarantined follows the discovery that this is not the database that relays were accepted on,
	// with what differs, and the end of that, with an empty reason.
	Quarantined func(reason string)
	// Reloaded follows every reload, with what changed, or why nothing did.
	Reloaded func(changes []string, err error)
	// DatabaseError follows each failed statement, which the relay will repeat.
	DatabaseError func(operation string, err error)
}

// Classes returns the values of [Attempt.Class].
func Classes() []string {
	return []string{lane.Live.String(), lane.Backlog.String(), lane.Replays.String()}
}

// A Wake is what ends a wait of the claimer.
type Wake string

// What ends a wait of the claimer.
const (
	WakeNotify Wake = "notify" // a producer or another relay notified, or work was given back
	WakePoll   Wake = "poll"   // something was due that the claimer had planned
	WakeRoom   Wake = "room"   // a lane that wants more has room again
)

// Wakes returns every value of [Wake].
func Wakes() []Wake { return []Wake{WakeNotify, WakePoll, WakeRoom} }
