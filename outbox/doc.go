// Package outbox writes events into the table outbox, inside the transaction that makes them true.
//
//	tx, err := pool.Begin(ctx)
//	// … UPDATE invoice SET state = 'issued' … in tx
//	event, err := outbox.NewEvent("invoice.issued", "invoice-4711-issued", invoice)
//	_, err = outbox.Enqueue(ctx, tx, event)
//	err = tx.Commit(ctx)
//
// A committed event is delivered to every destination that a route gives its type, at least once,
// or stays visible: held until its destination is back, failed or parked until an operator decides.
// A rolled-back event is never seen. Enqueue does not talk to the network and starts no goroutine:
// it runs one INSERT. The sidecar outbox-relay does the rest.
//
// # Idempotency keys
//
// The key names the event for ever. Receivers ignore a key they have seen, and Enqueue does the
// same: repeat a business operation whose outcome you do not know, with the same keys, and nothing
// happens twice.
//
//	same key, same content    nothing is written; Result.Duplicates names the key
//	same key, other content   ErrKeyReused: two facts claim one name; roll back
//
// So derive the key from the business fact, never from a clock or a random number. Content is every
// field but AvailableAt and the trace headers, and the payload counts byte for byte.
//
// # Order
//
// Events with one OrderingKey reach each destination in the order in which they become due; of
// events that are due at once, in the order of their ids. Other events go out in parallel. Ids are
// given out at the INSERT, not at the COMMIT: two transactions that write events of one key at the
// same time have no order unless something makes one wait for the other. Locking the row that the
// key stands for (SELECT … FOR UPDATE, or just the UPDATE of that row) before Enqueue does.
//
// # Plain SQL
//
// The table is the interface; this package is a convenience. From any language, in the transaction
// of the business change:
//
//	INSERT INTO outbox (event_type, payload, idempotency_key)
//	VALUES ('invoice.issued', '{"invoice": 4711}', 'invoice-4711-issued')
//	ON CONFLICT DO NOTHING;
//
// All other columns have defaults. Constraints, named after their rules, refuse a type or a key
// that could not be delivered. An event that breaks any other limit of [Event] is inserted, and
// fails under the rule's name when a relay routes it. Leave ON CONFLICT out to get an error for a
// key that exists. Never write the column xid: relays find an event by it.
//
// # Rights
//
// A producer needs the role outbox_producer of migrations/roles.sql: INSERT on outbox, and EXECUTE
// on the function that tells a duplicate from a reused key. It reads no event.
//
// The tables are found through search_path: each schema can hold its own outbox.
package outbox
