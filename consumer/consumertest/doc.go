// Package consumertest helps to test receivers.
//
// [NewRequest] makes the request that a relay would send, for a test of the whole receiver. It
// needs the receiver's tables in the test's database, which package migrations makes:
//
//	err := migrations.Up(ctx, db, migrations.Inbox) // db: a *sql.DB; of a pgxpool.Pool: stdlib.OpenDBFromPool(pool)
//	r, err := consumertest.NewRequest(ctx, "/webhooks/finance", consumer.Event{IdempotencyKey: "k", Type: "invoice.created", Payload: payload}, secret)
//	receive.ServeHTTP(httptest.NewRecorder(), r) // sends the event; the same event again is a duplicate, of a new NewRequest
//
// A [consumer.Handler] alone is tested by a call of it, with a transaction of the test's own, and
// needs no tables but its own:
//
//	tx, err := pool.Begin(ctx) // and tx.Rollback at the end, so that the next test finds nothing
//	err = ship(ctx, tx, consumer.Event{IdempotencyKey: "invoice-7/created", Type: "invoice.created", Payload: []byte(`{"total":"19.90"}`)})
//
// [WithTx] makes the context that a handler of net/http has behind [consumer.Middleware].
package consumertest
