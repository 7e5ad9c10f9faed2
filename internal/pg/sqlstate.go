package pg

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATEs that call for more than another try.
const (
	ReadOnlyTransaction  = "25006"
	LockNotAvailable     = "55P03"
	protocolViolation    = "08P01"
	UndefinedTable       = "42P01"
	undefinedColumn      = "42703"
	undefinedFunction    = "42883"
	wrongPassword        = "28P01"
	wrongAuthorization   = "28000"
	noSuchDatabase       = "3D000"
	LacksPrivilege       = "42501"
	tooManyConnections   = "53300"
	queryCanceled        = "57014"
	adminShutdown        = "57P01"
	cannotConnectNow     = "57P03"
	noSuchSchema         = "3F000"
	DivisionByZero       = "22012"
	serializationFailure = "40001"
	deadlockDetected     = "40P01"
)

// HasCode reports whether err is an error of the database with that SQLSTATE.
func HasCode(err error, code string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == code
}

// IsConflict reports whether a statement failed for something that may be over soon: another
// session's lock or transaction.
func IsConflict(err error) bool {
	return HasCode(err, LockNotAvailable) || HasCode(err, serializationFailure) || HasCode(err, deadlockDetected)
}

// An ErrorClass says what repeating a failed statement can bring.
type ErrorClass int

const (
	// ErrorPassing: waiting helps. The database is away or busy, or an operator has to change a
	// setting or a right.
	ErrorPassing ErrorClass = iota
	// ErrorDamaged: a page or a file cannot be read, or a limit of the server is met (SQLSTATE
	// classes XX, 58 and 54). Another try may help, waiting does not.
	ErrorDamaged
	// ErrorRefused: a constraint or a trigger is against a row (22, 23, 38, 39, 44, P0), or another
	// session keeps a lock.
	ErrorRefused
)

// ClassifyError returns the class of a failed statement; nil and errors of the connection are
// ErrorPassing.
func ClassifyError(err error) ErrorClass {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || len(pgErr.Code) != 5 {
		return ErrorPassing
	}
	switch pgErr.Code[:2] {
	case "54", "58", "XX":
		return ErrorDamaged
	case "22", "23", "38", "39", "44", "P0":
		return ErrorRefused
	}
	if pgErr.Code == LockNotAvailable {
		return ErrorRefused
	}
	return ErrorPassing
}

// TookTooLong reports whether a statement was ended by its time limit, the server's or its own.
func TookTooLong(err error) bool {
	return HasCode(err, queryCanceled) || errors.Is(err, context.DeadlineExceeded)
}

// OutcomeUnknown reports whether a statement that failed may have been executed. An error that the
// server reports and survives has undone it; so has one that kept it from being sent.
func OutcomeUnknown(err error) bool {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.SeverityUnlocalized != "ERROR"
	}
	return !pgconn.SafeToRetry(err)
}

// refusedByPooler reports whether an error is a pooler's, about what it does not keep. PgBouncer
// gives most of its own errors one SQLSTATE, also those that pass.
func refusedByPooler(err *pgconn.PgError) bool {
	return err.Code == protocolViolation &&
		(strings.Contains(err.Message, "startup parameter") || strings.Contains(err.Message, "statement pooling mode"))
}

// SchemaMayDiffer reports whether an error may come from a schema that is not the one this build
// knows.
func SchemaMayDiffer(err error) bool {
	return HasCode(err, UndefinedTable) || HasCode(err, undefinedColumn) || HasCode(err, undefinedFunction) || HasCode(err, noSuchSchema)
}

// ErrTakenForDead says that a relay is not registered any more: others have taken it for dead, and
// its claims have ended.
var ErrTakenForDead = errors.New("this relay was taken for dead; registering again")

// ErrTwoDatabases says that a relay's session and its pool lead to different databases.
var ErrTwoDatabases = errors.New("database.url and database.listen_url lead to different databases")

// WithRoleHint adds which right an operator forgot to grant. The functions run with the rights of
// the owner of the tables: a refusal for the schema means that owner, who makes the partitions of
// the archive.
func WithRoleHint(err error) error {
	var refused *pgconn.PgError
	switch {
	case !errors.As(err, &refused) || refused.Code != LacksPrivilege:
		return err
	case strings.Contains(refused.Message, "for schema"):
		return fmt.Errorf("%w; GRANT CREATE on that schema to the owner of the tables", err)
	}
	return fmt.Errorf("%w; run migrations/roles.sql again, as the owner of the tables, and grant this login outbox_relay", err)
}

// Hint says what a person can do about a failed statement; empty: nothing but wait.
func Hint(err error) string {
	var pgErr *pgconn.PgError
	var unknown *net.DNSError
	var connecting *pgconn.ConnectError
	switch {
	case errors.As(err, &unknown):
		return "the host's name in database.url does not resolve"
	case errors.Is(err, syscall.ECONNREFUSED), errors.As(err, &connecting) && errors.Is(err, fs.ErrNotExist): // of its socket
		return "nothing listens at the address of database.url: the server is stopped, or host or port are wrong"
	case errors.As(err, &connecting) && (errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)):
		return "the server of database.url does not answer: see whether its host is up, and whether a firewall is between"
	case errors.As(err, &pgErr) && (pgErr.Code == adminShutdown || pgErr.Code == cannotConnectNow):
		return "the server is stopping or starting"
	case errors.Is(err, ErrReadOnly), HasCode(err, ReadOnlyTransaction):
		return "waiting for a server that takes writes; with several hosts in database.url, target_session_attrs=read-write finds it"
	case errors.Is(err, ErrTwoDatabases):
		return "database.listen_url must lead to the same database as database.url, past the pooler"
	case HasCode(err, wrongPassword), HasCode(err, wrongAuthorization):
		return "the server refuses this login: check user and password in database.url"
	case HasCode(err, noSuchDatabase):
		return "the server has no such database: check the name in database.url"
	case HasCode(err, LacksPrivilege):
		return "the role lacks a right: run migrations/roles.sql and grant it outbox_relay"
	case HasCode(err, tooManyConnections):
		return "the server has no connection left: a relay needs four"
	case errors.As(err, &pgErr) && (strings.HasPrefix(pgErr.Code, "XX") || strings.HasPrefix(pgErr.Code, "58")):
		return "the server cannot read or write some of its own data: see its log, check the disk, and run pg_amcheck; a damaged index is fixed by REINDEX"
	case errors.As(err, &pgErr) && (strings.HasPrefix(pgErr.Code, "23") || strings.HasPrefix(pgErr.Code, "P0")):
		return "a constraint or trigger that does not belong to the outbox stands on its tables: drop it, or let it pass what relays write"
	case errors.As(err, &pgErr) && refusedByPooler(pgErr):
		return "a connection pooler stands before the server: set database.pooler to auto or transaction, and database.listen_url past it"
	}
	return ""
}
