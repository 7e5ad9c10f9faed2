// Package post makes one attempt of a delivery. It holds the settings of a destination
// (destination.go, wire.go), the interface behind which each scheme of a URL has its own way
// (carrier.go), whether a log is there before its first event (readiness.go), what a message says
// (request.go, cloudevents.go), how it travels over HTTP and where it may not (http.go,
// transport.go, direct.go, tls.go, egress.go), and what is kept of an answer and what never
// (excerpt.go, mask.go).
//
// Deliver makes exactly one attempt; what its result means for the delivery is policy's to decide.
// It knows no database, no lane and no other delivery. An Endpoint is safe for concurrent use.
package post
