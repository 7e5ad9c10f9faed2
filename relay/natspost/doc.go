// Package natspost publishes messages to a stream of NATS JetStream and waits for the acknowledgement of each. It holds the settings of
// such a destination (settings.go, subject.go), one connection (client.go, conn.go, wire.go), one publication (publish.go, publication.go),
// and what each error means for the delivery (result.go, stream.go).
//
// The client library neither reconnects nor publishes again by itself: a message that waits in a buffer, or goes out twice, would be an
// attempt that nothing counts. It does not wait for acknowledgements either: one subscription of a connection takes those of all attempts,
// because the library's way costs three times as much. An attempt that finds no connection makes one, and its error is the result of that attempt. Package post
// makes the messages; this one knows no database, no lane and no HTTP.
package natspost
