// Package policy holds the decisions about deliveries that need no database and no network: what an
// attempt came to and what is written about it (classify.go, decide.go), when to try again and
// until when (retry.go, not_after.go), and when a destination is down as a whole (breaker.go).
//
// Every function is pure, or changes only its receiver, and takes the time as a parameter. Nothing
// here is safe for concurrent use.
package policy
