package consumer

import "context"

// A memory tells first requests from duplicates: the database in whose transaction the handler works, or a [Store].
type memory interface {
	// admit finds out what to do with a request. It returns the event for the caller to end when the request is admitted,
	// and the status of the first answer when it is a duplicate.
	admit(ctx context.Context, rq *request) (held, admission, int, error)
}

// held is an admitted event. Nobody else's handler runs for it until it is remembered or rolled back.
type held interface {
	// remember keeps the answer's status for duplicates. The event is no longer held afterwards in any case.
	remember(ctx context.Context, rq *request, a *answer) error

	// rollback gives the event up, so that the next request runs it.
	rollback()

	// attach lets the handler find what it works with.
	attach(sc *scope)
}

// databaseMemory remembers in processed_events, in the transaction of the handler's own writes.
type databaseMemory struct {
	*settings
	db database
}

func (m *databaseMemory) admit(ctx context.Context, rq *request) (held, admission, int, error) {
	tx, found, status, err := m.settings.admit(ctx, m.db, rq, true)
	if tx == nil {
		return nil, found, status, err
	}
	return &heldTransaction{transaction: tx, settings: m.settings}, found, 0, nil
}

// heldTransaction holds the event by holding its transaction open.
type heldTransaction struct {
	transaction
	settings *settings
}

func (h *heldTransaction) remember(ctx context.Context, rq *request, a *answer) error {
	return h.settings.remember(ctx, h.transaction, rq, a)
}
