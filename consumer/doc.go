// Package consumer makes the effect of an event happen once, however often the event is POSTed.
//
// It is the receiving half of outbox-relay: an http.Handler that remembers processed events in the table processed_events,
// in the same transaction as your handler's own writes. "outbox-relay migrate up --set inbox", or migrations.Up with
// migrations.Inbox, creates the table. docs/receiving.md is the guide, with chi, echo, gin, sqlx and GORM.
//
//	cfg := consumer.Config{Receiver: "logistics", Source: "finance", Secrets: []string{os.Getenv("FINANCE_SECRET")}}
//	receive, err := consumer.New(pool, cfg, func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
//		_, err := tx.Exec(ctx, "INSERT INTO shipment (invoice) VALUES ($1)", event.RelatedReference) // through tx, and only tx
//		return err // nil commits; an error rolls back, and the relay retries
//	})
//	mux.Handle("POST /webhooks/finance", receive)
//
// This is the way for nearly all receivers: the transaction is the handler's parameter tx, and what
// the handler returns decides. Only a handler of net/http that must write the answer itself needs
// [Middleware], and finds its transaction by [Tx].
//
// Beside this package, all with the same [Config] and [Event]:
//
//   - consumer/sqlconsumer is the same for database/sql.
//   - consumer/inbox records events and answers at once; workers call the handler later, with retries.
//   - consumer/store is for effects that are not in PostgreSQL, such as an e-mail.
//   - consumer/breaker refuses events while something that handlers need is down.
//   - consumer/consumertest has what unit tests of handlers and receivers need.
//
// # The way of a request
//
//	limit the body ─▶ verify the signature ─▶ BEGIN, insert the event ─▶ handler ─▶ store the status, COMMIT ─▶ answer
//	        413, 408            400, 401           409, 421, 422, 503, or
//	                                               the stored status
//
// Nothing is sent before COMMIT has succeeded, and has reached the disk also where synchronous_commit is off. So the
// handler's response is buffered whole, and its ResponseWriter can neither flush nor be hijacked. If the process dies
// anywhere on the way, either both the effect and the memory of it are there or neither is, and the relay's next attempt
// finds out which.
//
// # What the sender is answered
//
//	case                                             answer
//	first time, the handler returns nil              204, after the commit; behind Middleware what it answers, if that is 2xx. The
//	                                                 status is stored for duplicates
//	first time, the handler returns an error         by the table of New, after the rollback; behind Middleware what it answers
//	behind Middleware, the handler answers nothing   500, after the rollback: a framework may hold back an error
//	duplicate                                        the stored status with Idempotency-Replayed: true and no body, or 200 if Once has
//	                                                 recorded the event; the handler does not run
//	another request with the key is in flight        409, Retry-After: 1; at once, without waiting for it
//	the event is known from another destination      421; the log says what to set
//	the key was processed with another body          422; nothing changes
//	it may have been processed and forgotten         422; nothing changes
//	no key, or a malformed header                    400
//	signature missing or wrong, timestamp stale      401; without either the body is not read
//	body broken off or too slow, body too large      408, 413
//	too many unverified bodies arrive at once        503
//	the handler panics                               500, after the rollback (http.ErrAbortHandler: no answer)
//	the handler ends the transaction itself          500
//	COMMIT fails                                     500; 503, Retry-After: 1 if the database asks to repeat (40001, 40P01)
//	the database fails, or lacks tables or rights    503, Retry-After: 1; the handler does not run
//	[Config].Breaker is open                         503 with Retry-After, at once; neither database nor handler is tried
//
// 400, 401, 408 and 413 are given before the database is touched. Every refusal is application/problem+json whose type, such
// as urn:outbox-relay:problem:key-reused, is stable. outbox-relay retries all of them except 400, 413 and 422, which no
// repetition can change.
//
// # What is remembered, and for how long
//
// For ever, unless you call [Prune]. One call announces a time in the table inbox_forgotten; a later call removes the events
// that were received before it. An unknown event may have been processed and forgotten if it was created before that time, or
// arrives later than its sender said it would. The receiver refuses it, and the sender's operator decides. A known event is a
// duplicate, however old it is. Prune never removes an event that its relay may still send.
//
// An event without a creation time ([Once], [Verify].AcceptForeign) cannot be refused that way. Its
// row must be kept for longer than its sender may repeat it: [Config].SenderNotAfter does so for
// foreign senders, and PruneConfig.Retention alone for Once. Never remove rows of processed_events
// in any other way.
//
// # What the handler owes
//
//   - It writes through its transaction. A write through another connection commits on its own, and so does an e-mail: give it
//     to an outbox, in the same transaction.
//   - It does not commit or roll back: what it returns does. It may use savepoints.
//   - It does not delete the event's row from processed_events: that statement fails. It may set personal columns of it to NULL.
//   - It may set what it likes, and a role that it resets. No other event inherits a setting, or a session lock or temporary
//     table that it leaves behind.
//   - It returns the error of a failed statement. PostgreSQL commits nothing after one, so nil becomes a 500. For a
//     statement that may fail, use a savepoint: [pgx.BeginFunc] on the transaction.
//   - It expects its context to end when the client hangs up. A handler that is past its last statement commits all the
//     same. One whose work takes longer than the relay's timeout uses context.WithoutCancel: the retry gets 409 until it is done,
//     then its status.
//
// # What a handler returns
//
// [Permanent], [RetryAfter] and [Ignore] mark an error, any other is tried again. Errors reach tables, logs and answers with
// credentials masked; what else must stay private [Config].Redact removes. [Router] calls one function for each type and
// version of events; [HandleJSON] decodes the payload for it.
//
//	router := consumer.NewRouter()
//	consumer.HandleJSON(router, "invoice.created", 1, func(ctx context.Context, tx pgx.Tx, event consumer.Event, invoice Invoice) error {
//		_, err := tx.Exec(ctx, "INSERT INTO shipment (invoice) VALUES ($1)", invoice.Number)
//		return err
//	})
//	receive, err := consumer.New(pool, cfg, router.Dispatch)
//
// # Events that come late
//
// Without an ordering key, and with replays, an older event may arrive after a newer one. A handler that overwrites the
// state of an entity first asks [ApplyIfNewer], which compares versions in the same transaction: sequences or times.
//
// # While something is down
//
// [Config].Breaker notices that what handlers depend on is down, the database among it, and answers 503 at once until a probe
// succeeds. A relay then holds the events of this destination at no cost in attempts. [DependencyDown] and the statuses 502,
// 503 and 504 are how a handler reports that.
//
//	b, err := breaker.New(breaker.Config{})
//	cfg := consumer.Config{Receiver: "logistics", Source: "finance", Secrets: secrets, Breaker: b}
//
// # Who is trusted
//
// A request must carry outbox-relay's own signature (x1), which binds the key and every X-Outbox
// header to the body: a captured request cannot be sent again under another key or type.
// [Verify].AcceptForeign also takes plain Standard Webhooks senders, whose webhook-id is then the
// key. [Verify].Custom takes a sender that signs in its own way.
//
// [Once] is the bare memory, for events that come by another transport than HTTP.
package consumer
