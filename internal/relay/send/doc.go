// Package send makes the attempts of what lanes hold: one goroutine each, as many as a lane may
// have, and only while it has something to send. Package post makes the requests.
//
//	send.go     the senders; one attempt
//	suspect.go  deliveries that may kill their relay
//	attempt.go  what observers are told of an attempt; how senders end
//	store.go    payloads that a claim did not bring; suspects
package send
