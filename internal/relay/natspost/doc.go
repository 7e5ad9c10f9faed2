// Package natspost publishes messages to a stream of NATS JetStream and waits for the
// acknowledgement of each. It holds the settings of such a destination (settings.go, subject.go),
// its connection (client.go, conn.go), one publication (publish.go), and what each error means for
// the delivery (result.go, stream.go).
//
// The client library connects, authenticates, writes, and matches acknowledgements to messages. It
// neither reconnects nor publishes again by itself: a message that waits in a buffer, or goes out
// twice, would be an attempt that nothing counts. Attempts that find no connection wait, each for
// its own time, until one is made for all of them; if that fails, its error is the result of each.
// Package post makes the messages; this package knows no database, no lane and no HTTP.
package natspost
