// Package inbox is the command inbox: the operator's side of a receiver, at the database of that
// receiver.
//
//	inbox.go  the commands, the flags that choose events, inbox status
//	list.go   inbox list and show
//	bulk.go   inbox replay and ignore
//	prune.go  inbox prune
package inbox
