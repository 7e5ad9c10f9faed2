// Package send makes the attempts of what lanes hold: one goroutine each, as many as a lane may
// have, and only while it has something to send. Package post makes the requests.
//
//	send.go     the senders, how they end; one attempt
//	observe.go  what the log, traces and observers get of an attempt
//	suspect.go  deliveries that may kill their relay
//	store.go    payloads that a claim did not bring; suspects
package send
