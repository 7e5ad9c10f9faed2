// Package compare finds out whether everything that was delivered took effect, exactly once: it
// compares an outbox with what a receiver has, which answers as package reconcile says.
//
//	compare.go  the run, from the clocks to the report
//	scan.go     digests of both sides, and which ranges of keys differ
//	name.go     the keys of these ranges, one by one; each finding is checked again before it is named
//	report.go   what was found
//	store.go    the sender's statements
//
// Only what was delivered before the run, less a settling time, must be there. What was delivered
// shortly after may be there, and a difference that is made of such keys alone is none. So events
// that are committed, sent and received meanwhile are never reported, and clocks that differ cost
// time, not truth: a loss is named only after the receiver was asked for its key.
package compare
