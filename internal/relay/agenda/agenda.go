package agenda

import (
	"strings"
	"time"
)

// A Cause is a reason for which the claimer takes a turn, or a set of them. docs/architecture.md
// lists who registers each one, and what the turn does then.
type Cause uint32

// The causes. What others post is due at once; the rest comes at its time.
const (
	CauseEntry       Cause = 1 << iota // the relay has registered, again perhaps, or has yet to
	CauseTick                          // a poll interval has passed since the last tick
	CauseNotified                      // posted: producers have committed, and notify
	CauseNotifyGap                     // posted: producers had stopped notifying while this relay was armed
	CauseSweep                         // posted: rows may be due behind the cursors
	CausePoll                          // the pace asks for a take
	CauseIdle                          // the relay may become idle
	CauseCutRange                      // the last range was cut
	CauseTakeAgain                     // a take was due, and no lane had room, or another relay was taking
	CauseJoinKeys                      // deliveries have become due, and have to join their ordering keys
	CauseAwaitedKeys                   // another relay has ordering keys in hand for which events wait here
	CauseRescue                        // also posted: there may be ranges that no relay has in hand
	CauseRetry                         // a delivery that this relay has put off is due
	CauseScan                          // a scan has failed, or a breaker lets a lane try
	CauseBreaker                       // also posted: a breaker has decided something, or its next trial is due
	CauseRoom                          // posted: outcomes were written, so that a lane has room
	CauseReadyKeys                     // the next deliveries of ordering keys may be claimed
	CauseCursor                        // a cursor has not come to its end
	CauseLittleRoom                    // a lane had too little room to be worth a claim
	CauseRate                          // a lane may send again: its rate, or its receiver, made it wait
	CauseContention                    // another relay was claiming from the same rows
	CauseDamage                        // part of a claim was put off because its data is damaged
)

var causeNames = [...]string{
	"entry", "tick", "notified", "notify_gap", "sweep", "poll", "idle", "cut_range", "take_again", "join_keys", "awaited_keys", "rescue", "retry", "scan",
	"breaker", "room", "ready_keys", "cursor", "little_room", "rate", "contention", "damage",
}

// Has reports whether the sets have a cause in common.
func (c Cause) Has(some Cause) bool { return c&some != 0 }

// String returns the names, separated by commas.
func (c Cause) String() string {
	var names []string
	for i, name := range causeNames {
		if c.Has(1 << i) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}

// TurnGap is how long after a turn the next one comes at the earliest, unless its cause is urgent
// or was posted.
const TurnGap = 20 * time.Millisecond

// urgent causes have an exact time, or each turn brings their end nearer.
const urgent = CauseTick | CausePoll | CauseIdle | CauseCutRange | CauseJoinKeys | CauseReadyKeys

// An Agenda says when the claimer acts next, and why. It has at most one time for each cause. The
// zero value is empty. Its methods are not safe for concurrent use.
type Agenda struct {
	planned Cause
	at      [len(causeNames)]time.Time
}

// At makes each of the causes due at the given time, or at the one that is registered if that is
// earlier.
func (a *Agenda) At(causes Cause, at time.Time) {
	for i := range a.at {
		if c := Cause(1) << i; causes.Has(c) && (!a.planned.Has(c) || at.Before(a.at[i])) {
			a.planned, a.at[i] = a.planned|c, at
		}
	}
}

// Take removes and returns what is due.
func (a *Agenda) Take(now time.Time) (due Cause) {
	for i, at := range a.at {
		if !now.Before(at) {
			due |= a.planned & (1 << i)
		}
	}
	a.planned &^= due
	return due
}

// Next returns how long it is until the next turn, and its cause, which is 0 if the agenda is
// empty.
func (a *Agenda) Next(now time.Time) (wait time.Duration, cause Cause) {
	for i, at := range a.at {
		c := a.planned & (1 << i)
		until := max(at.Sub(now), 0)
		if !urgent.Has(c) {
			until = max(until, TurnGap)
		}
		if c != 0 && (cause == 0 || until < wait) {
			wait, cause = until, c
		}
	}
	return wait, cause
}
