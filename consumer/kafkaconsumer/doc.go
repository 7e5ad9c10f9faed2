// Package kafkaconsumer gives the records of Kafka topics to a receiver of package consumer, so
// that an event which comes by a topic has the same signature, memory, handlers and reports as one
// that comes by HTTP, and counts once if it comes by both (consumer.Config.Destinations names the
// two).
//
//	receive, err := consumer.New(pool, consumer.Config{Receiver: "search", Secrets: secrets}, router.Dispatch)
//	events, err := kafkaconsumer.New(kafkaconsumer.Config{
//		Group: "search", Topics: []string{"invoices"}, Client: []kgo.Opt{kgo.SeedBrokers("kafka:9092")},
//	}, receive)
//	err = events.Run(ctx) // until ctx ends
//
// consumer/examples/kafka is a complete program.
//
// The receiver is any [http.Handler] of packages consumer, sqlconsumer, store or inbox. Each record
// becomes the request that a relay would have sent; what the receiver answers decides about the
// record:
//
//	2xx                                                committed, or a duplicate: its offset may be committed
//	400, 406, 410, 411, 413, 414, 415, 422, 431, 501   refused for good: Config.Refused, then as above
//	any other, or no answer                            tried again after Config.Schedule, or after a longer Retry-After
//
// Offsets are committed after the database's COMMIT, once a second and when a partition is given
// back. What a process that dies has not committed comes again, and is answered from memory.
//
// # Order
//
// Records of a partition are worked one after the other, partitions beside each other; the relay
// gives all events of an ordering key the same partition. A record that fails keeps those behind it
// in its partition waiting, as order demands. With an inbox as the receiver that wait is short: a
// record's offset advances once it is recorded, and an event that fails for good ends as failed in
// the inbox while other keys continue. While partitions move between processes a record may be
// worked by two of them: the memory lets one of them do so.
//
// # What was tried
//
// The tests run against kfake, franz-go's imitation of a broker, in its own process, which is
// killed and answers with errors. No real broker has been tried: neither its TLS and SASL, nor the
// timing of its elections, nor its quotas.
package kafkaconsumer
