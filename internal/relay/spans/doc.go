// Package spans describes attempts as spans of OpenTelemetry, by its API alone: what records and
// exports them is the provider's, which package relay is given.
//
// One attempt is one span, a child of the producer's trace context. Without one, the event's
// attempts make their own trace, whose id follows from the event. The request carries the
// context of its span, so that the receiver continues it.
//
// # Links
//
// The span of a retry links to the first attempt. Nothing stores that one's id: it follows from the
// event, the destination and the promise of the delivery (X-Outbox-Not-After), which the first
// claim makes and every later one reads. So the link also holds after a restart, and at another
// relay. The attempt number would not do: a probe spends no number, and a relay that dies in an
// attempt leaves none.
//
// A promise begins again when no receiver can know of it: after a request that found no connection,
// and with a replay. The next request is then the first attempt that later ones link to.
package spans
