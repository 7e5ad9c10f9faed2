// Package inbox records events at once and processes them later, each once, as package consumer
// does within the request.
//
// An [Inbox] has two halves. Its Handler stores the event with its payload in the table
// inbox_events and its key in processed_events, and answers 202. Its Run, in the same process or in
// others, processes stored events: each in a separate transaction that commits the handler's writes
// together with the event's state. The sender waits for one statement, however long the work takes.
//
//	invoices, err := inbox.New(pool, inbox.Config{
//		Config: consumer.Config{Receiver: "logistics", Secrets: secrets},
//		Handle: router.Dispatch,
//	})
//	mux.Handle("POST /webhooks/finance", invoices.Handler())
//	err = invoices.Run(ctx) // until ctx ends
//
//	pending ─▶ processing ─▶ succeeded   the handler returned nil
//	   ▲           │    ├──▶ ignored     it returned consumer.Ignore, or knows no such type
//	   └───────────┘    └──▶ failed      it returned consumer.Permanent, has failed MaxAttempts
//	                                     times, or its worker died 20 times in a row
//	 failed: later, on the schedule
//	 its worker died: within two seconds
//
// The lock of the event's row is the lease. It ends with the worker's transaction, however that
// ends: a killed worker is noticed within two seconds, and a living one is never taken for dead.
//
// A duplicate is answered 200 with the event's state and changes nothing. The state is "recorded"
// if the event was removed from inbox_events by hand, because its fate is unknown then.
//
// Events of one ordering key are processed one after the other, in the sender's order. An event
// that fails for good blocks those behind it, unless OnFailure is [FailureSkips]. Operators use the
// command outbox-relay inbox.
package inbox
