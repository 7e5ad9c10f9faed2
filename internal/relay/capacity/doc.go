// Package capacity holds how much a lane may send: what its receiver can bear (flow.go, with
// refusals.go), what it gets of the relay (share.go), and when a delivery that may kill the relay
// is sent alone (suspect.go).
//
// Every method changes only its receiver, and takes the time as a parameter. Nothing here but
// Solitude is safe for concurrent use.
package capacity
