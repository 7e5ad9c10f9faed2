// Package kafkapost writes records to topics of Kafka and waits until all replicas in sync have
// each. It holds the settings of such a destination (settings.go), the client (client.go), one
// record (publish.go), and what each error means for the delivery (result.go).
//
// The producer is idempotent: what the client library sends again within an attempt is stored once.
// An attempt that ends without an answer is given up, and the next one writes a new record; its
// reader suppresses it as a duplicate. Package post makes the records; this one knows no database,
// no lane and no HTTP.
package kafkapost
