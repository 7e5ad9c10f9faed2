// Package store receives events whose effect is not in PostgreSQL, as package consumer does for
// those whose effect is.
//
// [Middleware] remembers events in a [Store] instead of a table, and answers alike:
//
//	receive, err := store.Middleware(redisstore.New(client, redisstore.Options{}), store.Config{Config: consumer.Config{Receiver: "mailer", Secrets: secrets}})
//	mux.Handle("POST /webhooks/finance", receive(handler))
//
// Then the effect and the memory of it are two things: a request holds its event by a lease,
// nothing rolls back what its handler did, and a crash between effect and memory repeats the
// effect. Use it where there is no transaction to join, and pass the event's key on to whatever the
// handler calls. Which writes should be safe to repeat, [Middleware] says.
//
// The modules consumer/redisstore and consumer/dynamostore have stores, and consumer/storetest
// tests others.
package store
