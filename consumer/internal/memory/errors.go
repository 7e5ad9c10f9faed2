package memory

import (
	"errors"
	"fmt"
	"slices"

	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
)

// Errors that users see under the names of their packages.
var (
	// ErrMiddlewareCommits is consumer.ErrMiddlewareCommits.
	ErrMiddlewareCommits = errors.New("consumer: the transaction ends after the handler: return nil, or answer 2xx, to commit, and anything else to roll back")
	// ErrLeaseLost is store.ErrLeaseLost.
	ErrLeaseLost = errors.New("store: the lease ended and another request took the event over")
)

// Outcomes of a handler's transaction that are not errors of the database.
var (
	// ErrEnded says that the row that the transaction inserted is not its own any more, or gone.
	ErrEnded = errors.New("the handler committed or rolled back the transaction itself")
	// ErrNotCommit says that something else ran in the place of a COMMIT.
	ErrNotCommit = errors.New("COMMIT did not commit: a prepared statement of the connection has its name")
	// ErrRowsOpen says that the connection is in use, so nothing can be sent over it.
	ErrRowsOpen = errors.New("the handler left rows of a query open: close them before it returns")
	// ErrAborted says that PostgreSQL answered COMMIT of an aborted transaction with ROLLBACK.
	ErrAborted = errors.New("a statement of the handler failed and the handler answered 2xx all the same")
	// ErrNotRemembered says that the handler's effect has happened, and no transaction takes it
	// back.
	ErrNotRemembered = errors.New("the handler's effect has happened, but the store may not remember it: it happens again when the event is sent again")

	// ErrTimeout is the cause for which the context of a handler ends.
	ErrTimeout = errors.New("the handler did not end within Config.Limits.HandlerTimeout")

	errRecorded   = errors.New("consumer: Once is called for the event whose handler calls it: that is recorded already, and is the handler's to work")
	errTemporary  = errors.New("a temporary table hides the receiver's own: one of that name was left on the connection")
	errOutOfReach = errors.New("processed_events is out of reach; a handler that has set a role must put it back")
)

// Hinted adds what an operator can do about an error of the first statement; other errors stay as
// they are.
func Hinted(err error) error {
	switch sqlstate.Of(err) {
	case sqlstate.UndefinedTable, sqlstate.UndefinedColumn, sqlstate.UndefinedFunction:
		return fmt.Errorf("%w; the receiver's tables are missing or of another version: run outbox-relay migrate up --set inbox", err)
	case sqlstate.InsufficientPrivilege:
		return fmt.Errorf("%w; run migrations/roles.sql and grant the login inbox_receiver, or inbox_receiver_NAME where receivers are kept apart, with your role prefix if you have one", err)
	}
	return err
}

// isHandlers reports whether an error of COMMIT is the handler's fault. Then no COMMIT but the
// handler's own was carried out.
func isHandlers(err error) bool {
	return slices.ContainsFunc([]error{ErrEnded, ErrRowsOpen, ErrAborted, ErrNotCommit}, func(of error) bool { return errors.Is(err, of) })
}

// IsDown reports whether an error of COMMIT is the database's own trouble (a lost connection, which
// has no SQLSTATE, a full disk, a shutdown), or the store's.
func IsDown(err error) bool {
	if isHandlers(err) || errors.Is(err, ErrLeaseLost) {
		return false
	}
	code := sqlstate.Of(err)
	if len(code) < 2 {
		return true
	}
	switch code[:2] {
	case "08", "53", "58", "XX": // connection, resources, system, internal
		return true
	case "57": // an operator's intervention
		return code != sqlstate.QueryCanceled
	}
	return false
}
