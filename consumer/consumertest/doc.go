// Package consumertest helps to test receivers.
//
// [NewRequest] makes the request of a relay, for a test of the whole receiver. A [consumer.Handler] alone is tested by a call of it,
// with a transaction of the test's own:
//
//	tx, err := pool.Begin(ctx) // and tx.Rollback at the end, so that the next test finds nothing
//	err = ship(ctx, tx, consumer.Event{Key: "invoice-7/created", Type: "invoice.created", Payload: []byte(`{"total":"19.90"}`)})
//
// [WithTx] makes the context that a handler of net/http has behind [consumer.Middleware].
package consumertest
