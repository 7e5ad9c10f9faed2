// Package claim claims pending rows that are due, for the lanes that have room.
//
//	rows.go                      what a claim does: ask, apply what it found, hand out
//	request.go                   what to claim for which lane
//	apart.go                     claiming around damaged data
//	store_due.go, store_keys.go  the statements: scans, and ordering keys
//	store_search.go              of many destinations, those for which something is due
package claim
