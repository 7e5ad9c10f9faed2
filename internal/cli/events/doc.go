// Package events is what operators look at and change event by event: the commands events, explain,
// send, replay, retry and discard.
//
//	events.go     events list and show
//	tail.go       events tail
//	create.go     events create-deliveries
//	explain.go    explain
//	send.go       send
//	selection.go  the flags that choose deliveries
//	bulk.go       what the three that follow share
//	replay.go     replay
//	retry.go      retry
//	discard.go    discard
package events
