// Package consumer makes the effect of an event happen once, however often the event is POSTed.
//
// It is the receiving half of outbox-relay: an http.Handler that records processed events in the
// table processed_events, in the same transaction as the handler's own writes. The command
// "outbox-relay migrate up --set inbox", or migrations.Up with migrations.Inbox, creates the table.
// docs/receiving.md is the guide, with chi, echo, gin, sqlx and GORM.
//
//	cfg := consumer.Config{Receiver: "logistics", Source: "finance", Secrets: secrets}
//	ship := func(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
//		_, err := tx.Exec(ctx, "INSERT INTO shipment (invoice) VALUES ($1)", event.RelatedReference)
//		return err // nil commits; an error rolls back, and the relay retries
//	}
//	receive, err := consumer.New(pool, cfg, ship)
//	mux.Handle("POST /webhooks/finance", receive)
//
// This is the way for nearly all receivers: the transaction is the handler's parameter tx, and what
// the handler returns decides. Only a handler of net/http that must write the answer itself needs
// [Middleware], and finds its transaction by [Tx].
//
// Beside this package, all with the same [Config] and [Event]:
//
//   - consumer/sqlconsumer is the same for database/sql.
//   - consumer/inbox records events and answers at once. Workers call the handler later.
//   - consumer/store is for effects that are not in PostgreSQL, such as an e-mail.
//     consumer/redisstore and consumer/dynamostore remember events for it.
//   - consumer/natsconsumer and consumer/kafkaconsumer read events from a stream or a topic.
//   - consumer/promobserver counts for Prometheus.
//   - consumer/breaker refuses events while something that handlers need is down.
//   - consumer/consumertest has what unit tests of handlers and receivers need.
//
// # The way of a request
//
//	limit the body ─▶ verify the signature ─▶ BEGIN, insert the event ─▶ handler ─▶ COMMIT
//	   413, 408            400, 401             409, 421, 422, 503, or        ─▶ answer
//	                                            the stored status
//
// The receiver sends nothing before COMMIT has succeeded and reached the disk, even where
// synchronous_commit is off. So it buffers the handler's whole response, and the ResponseWriter can
// neither flush nor be hijacked. If the process dies at any point, the effect and the record of the
// event are either both there or both missing, and the relay's next attempt finds out which.
//
// # What the sender is answered
//
//	first time, the handler returns nil             204, after the commit; behind Middleware its own
//	                                                2xx. The status is stored for duplicates
//	first time, the handler returns an error        by the table of New, after the rollback; behind
//	                                                Middleware the handler's own answer
//	behind Middleware, the handler answers nothing  500, after the rollback
//	duplicate                                       the stored status, Idempotency-Replayed: true and
//	                                                no body, or 200 if Once has recorded the event;
//	                                                the handler does not run
//	another request with the key is in flight       409 with Retry-After: 1, at once
//	the event is known from another destination     421; the log says what to set
//	the key was processed with another body         422; nothing changes
//	it may have been processed and forgotten        422; nothing changes
//	no key, or a malformed header                   400
//	signature missing or wrong, timestamp stale     401; without either the body is not read
//	body broken off or too slow, body too large     408, 413
//	too many unverified bodies arrive at once       503
//	the handler panics                              500, after the rollback; after http.ErrAbortHandler
//	                                                the connection is closed without an answer
//	the handler ends the transaction itself         500
//	COMMIT fails                                    500; 503 with Retry-After: 1 for a conflict
//	the database fails, or lacks tables or rights   503 with Retry-After: 1; no handler runs
//	[Config].Breaker is open                        503 with Retry-After, at once
//
// The receiver answers 400, 401, 408 and 413 before it uses the database. Every refusal is
// application/problem+json with a stable type, such as urn:outbox-relay:problem:key-reused.
// outbox-relay retries all of them except 400, 413 and 422, which no repetition can change.
//
// # What is remembered, and for how long
//
// Events are remembered for ever unless you call [Prune]. One call announces a time in the table
// inbox_forgotten, and a later call removes the events that were received before it. An unknown
// event may have been processed and forgotten if it was created before that time, or arrives later
// than its sender promised. The receiver refuses it, and the sender's operator decides. A known
// event is a duplicate at any age. Prune never removes an event that its relay may still send.
//
// An event without a creation time ([Once], [Verify].AcceptForeign) cannot be refused that way. Its
// row must be kept for longer than its sender may repeat it: [Config].SenderNotAfter does so for
// foreign senders, and PruneConfig.Retention alone for Once. Never remove rows of processed_events
// in any other way.
//
// # Duties of the handler
//
//   - It writes through its transaction. A write through another connection commits on its own, and
//     so does an e-mail: put it into an outbox, in the same transaction.
//   - It does not commit or roll back: its result does. It may use savepoints.
//   - It does not delete the event's row from processed_events: that statement fails. It may set
//     personal columns of the row to NULL.
//   - It may change settings and roles. No other event inherits a setting, a role, a session lock
//     or a temporary table from it.
//   - It returns the error of a failed statement. PostgreSQL commits nothing after one, so nil
//     becomes a 500. Use a savepoint ([pgx.BeginFunc]) for a statement that may fail.
//   - It expects its context to end when the client hangs up. A handler that has run its last
//     statement still commits. One that takes longer than the relay's timeout uses
//     context.WithoutCancel: the retry gets 409 until it is done, and then its status.
//
// # Results of the handler
//
// [Permanent], [RetryAfter] and [Ignore] mark an error. Any other error is retried. Errors reach
// tables, logs and answers with credentials masked; [Config].Redact removes what else is private.
// [Router] calls one function for each type and version, and [HandleJSON] decodes the payload.
//
//	router := consumer.NewRouter()
//	consumer.HandleJSON(router, "invoice.created", 1, ship) // ship(ctx, tx, event, invoice)
//	receive, err := consumer.New(pool, cfg, router.Dispatch)
//
// # Events that come late
//
// Without an ordering key, and with replays, an older event may arrive after a newer one. A handler
// that overwrites the state of an entity first calls [ApplyIfNewer], which compares sequences or
// times in the same transaction.
//
// # Whether all of it took effect
//
// [Reconcile] returns a second handler, which the sender's operator asks what this receiver has:
// "outbox-relay reconcile" names events that never arrived, have no effect or happened twice.
//
// # While something is down
//
// [Config].Breaker notices that a dependency of handlers is down, the database among them. It
// answers 503 at once until a probe succeeds. A relay then holds the events of this destination and
// spends no attempts. A handler reports such an outage by [DependencyDown] or a status of 502, 503
// or 504.
//
//	b, err := breaker.New(breaker.Config{})
//	cfg := consumer.Config{Receiver: "logistics", Source: "finance", Secrets: secrets, Breaker: b}
//
// # Who is trusted
//
// A request must carry outbox-relay's own signature (x1), which binds the key and every header that
// begins with X-Outbox-, X-Event- or Ce- to the body: a captured request cannot be sent again under
// another key or type.
// [Verify].AcceptForeign also takes plain Standard Webhooks senders, whose webhook-id is then the
// key. [Verify].Custom takes a sender that signs in its own way.
//
// [Once] is the bare deduplication, for events that come in any other way, such as from a file.
package consumer
