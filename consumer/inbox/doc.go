// Package inbox records events now and works them later, each once, as package consumer does within the request.
//
// An [Inbox] splits the way of an event in two. Its Handler records the event, payload and all, in
// the table inbox_events, remembers it in processed_events, and answers 202; its Run, in the same
// process or in others, works what is recorded: every event in a separate transaction that commits
// the handler's writes together with the event's state. The sender waits for one statement,
// whatever the work costs.
//
//	invoices, err := inbox.New(pool, inbox.Config{Config: consumer.Config{Receiver: "logistics", Secrets: secrets}, Handle: router.Dispatch})
//	mux.Handle("POST /webhooks/finance", invoices.Handler())
//	err = invoices.Run(ctx) // until ctx ends
//
//	pending ─▶ processing ─▶ succeeded   the handler returned nil
//	   ▲           │    ├──▶ ignored     it returned consumer.Ignore, or knows no such type
//	   └───────────┘    └──▶ failed      it returned consumer.Permanent, has failed MaxAttempts times, or its worker died 20 times in a row
//	 failed: later, on the schedule
//	 its worker died: within two seconds
//
// The lock of the event's row is the lease: it ends with the worker's transaction, however that ends, so a worker that was
// killed is noticed within two seconds and one that lives is never taken for dead. A duplicate is answered 200 with the
// event's state, and changes nothing; the state is "recorded" where the event was removed from inbox_events by hand, so that its
// fate is not known. Events of one ordering key are worked one after the other, in the sender's order;
// one that fails for good keeps those behind it waiting, unless OnFailure says [FailureSkips]. The command
// outbox-relay inbox is the operator's.
package inbox
