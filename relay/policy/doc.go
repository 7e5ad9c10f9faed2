// Package policy holds the decisions about deliveries that need no database and no network: what an attempt came to and what
// is written about it (outcome.go, decide.go), when to try again and until when (retry.go, not_after.go), when a destination
// is down as a whole (breaker.go), how much its receiver can bear (flow.go) and gets of the relay (share.go), when a delivery may
// kill its relay (suspect.go), when the claimer acts, and why (agenda.go, with pace.go, retry_times.go, rest.go and contention.go), and
// behind which events it claims (floors.go).
//
// Every function is pure, or changes only its receiver, and takes the time as a parameter. Nothing here but RetryTimes and
// Solitude is safe for concurrent use.
package policy
