// Package consumertest helps to test receivers.
//
// [NewRequest] makes the request of a relay, for a test of the whole receiver. [WithTx] gives a handler its event and its
// transaction, for a test of the handler alone:
//
//	tx, err := pool.Begin(ctx) // and tx.Rollback at the end, so that the next test finds nothing
//	ctx = consumertest.WithTx(ctx, consumer.Event{Key: "invoice-7/created", Type: "invoice.created"}, tx)
//	answer := httptest.NewRecorder()
//	handler.ServeHTTP(answer, httptest.NewRequestWithContext(ctx, http.MethodPost, "/", strings.NewReader(`{"total":"19.90"}`)))
package consumertest
