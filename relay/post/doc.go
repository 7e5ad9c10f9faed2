// Package post makes one POST of a delivery. It holds the settings of a destination (destination.go, wire.go), what a request
// says (request.go, cloudevents.go), how it travels and where it may not (transport.go, tls.go, egress.go), and what is kept of
// an answer and what never (post.go, excerpt.go, mask.go).
//
// Send makes exactly one request; what its result means for the delivery is policy's to decide. It knows no database, no
// lane and no other delivery. An Endpoint is safe for concurrent use.
package post
