// Package dynamostore remembers in DynamoDB which events a receiver has processed, for handlers
// whose effect is not in PostgreSQL:
//
//	events := dynamostore.New(client, "processed_events") // a *dynamodb.Client
//	receive, err := store.Middleware(events, store.Config{Config: consumer.Config{Receiver: "logistics", Secrets: secrets, Source: "finance"}})
//	mux.Handle("POST /webhooks/finance", receive(handler))
//
// # The table
//
// Its partition key is the string event, and it has no sort key. [CreateTable] makes one, or the
// command line:
//
//	aws dynamodb create-table --table-name processed_events --billing-mode PAY_PER_REQUEST \
//		--attribute-definitions AttributeName=event,AttributeType=S --key-schema AttributeName=event,KeyType=HASH
//	aws dynamodb update-time-to-live --table-name processed_events \
//		--time-to-live-specification Enabled=true,AttributeName=expires_at
//
// Without the second command nothing goes wrong, but the table grows for ever. An event is one
// item: event (receiver, source and idempotency key), token, until (milliseconds: of the lease
// while a handler runs, of the TTL afterwards), expires_at (the same in seconds, for DynamoDB) and,
// once it is processed, known (the text of [store.Known]). The receiver needs dynamodb:GetItem,
// PutItem and DeleteItem on the table.
//
// # What is promised
//
// Every step is a conditional write to one item, so that of any number of processes one gets the
// event; reads are strongly consistent. As long as the clocks of all receivers agree within a fifth
// of the lease, and a handler obeys its context and its process does not stall for longer, an event
// has one handler at a time. A processed event is a duplicate for the TTL, and outlives the loss of
// machines. A handler that has lost its lease overwrites nothing. When DynamoDB does not answer, no
// handler runs.
//
// # What is not promised
//
//   - The effect and the memory of it are not one. When the process dies between them, or DynamoDB
//     stays away until CommitTimeout has passed, the effect happens again with the next request
//     after the lease.
//   - DynamoDB has no clock for conditions: whether a lease or a TTL has ended is decided by the
//     clock of the receiver that asks. One whose clock is ahead by more than a fifth of the lease
//     takes events over from handlers that still run.
//   - DynamoDB removes an item some time after expires_at, often days. That is housekeeping only:
//     an item whose time is over counts as absent, there or not.
//   - Global tables are not supported: a conditional write holds in its own region only, so send
//     the events of one source to one region. A table restored from a backup has forgotten what
//     came after it.
//   - A throttled table answers with errors: the request is refused with 503 before its handler, or
//     its response is offered again until CommitTimeout after it.
//   - There is no order between events, no inbox mode and no record of failures.
//
// Where any of this would cost money, let the effect be a row in PostgreSQL and use
// consumer.Middleware.
//
// # Setting up the client
//
// Retries of the client are harmless: each request's claim has its own token, by which a repeated
// write is recognised. Keep the timeouts of its HTTP client well below the lease.
package dynamostore
