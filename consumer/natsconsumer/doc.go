// Package natsconsumer gives the events of a NATS JetStream stream to a receiver of package
// consumer, so that an event which comes by a stream has the same signature, memory, handlers and
// reports as one that comes by HTTP, and counts once if it comes by both
// (consumer.Config.Destinations names the two).
//
//	receive, err := consumer.New(pool, consumer.Config{Receiver: "search", Secrets: secrets}, router.Dispatch)
//	events, err := natsconsumer.New(js, natsconsumer.Config{Stream: "OUTBOX", Durable: "search"}, receive)
//	err = events.Run(ctx) // until ctx ends
//
// consumer/examples/nats is a complete program.
//
// The receiver is any [http.Handler] of packages consumer, sqlconsumer, store or inbox. Each
// message becomes the request that a relay would have sent; what the receiver answers decides about
// the message:
//
//	2xx                                                committed, or a duplicate: acknowledged
//	400, 406, 410, 411, 413, 414, 415, 422, 431, 501   refused for good: Config.Refused, then terminated
//	any other, or no answer                            comes again after Config.Schedule, or after a longer Retry-After
//
// A message is acknowledged after COMMIT. When a process dies in between, the server delivers the
// message again once Config.AckWait is over, and it is answered from memory.
//
// # Order
//
// One durable consumer gives messages to whichever process asks first, so it keeps no order. For
// order by key, let the relay spread the keys over partitions (destinations.NAME.nats.partitions,
// with {partition} in the subject) and set Config.Partitions to the same number: each partition
// then has its own durable consumer, which has one message under way at a time, whatever number of
// processes run. A message that fails keeps those behind it in its partition waiting, as order
// demands. With an inbox as the receiver that wait is short: a message is acknowledged once it is
// recorded, and an event that fails for good ends as failed there while other keys continue.
//
// # What a stream needs
//
// A stream keeps a message after it was read (Retention: Limits), so a message that is refused can
// be found by its sequence, which the log names. Streams that remove what was acknowledged need
// [Config].Refused. Where events are pruned from processed_events, the receiver refuses a message
// as forgotten that comes after its sender's promise (X-Outbox-Not-After, 30 days): let the
// stream's MaxAge be less.
//
// Give the right to publish to the stream's subjects to relays alone: a stranger who has it may
// keep a partition waiting with messages that no secret has signed, since a wrong secret has the
// same effect and must lose nothing.
package natsconsumer
