package relay

import (
	"errors"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATEs that call for more than another try.
const (
	readOnlyTransaction = "25006"
	lockNotAvailable    = "55P03"
	protocolViolation   = "08P01"
	undefinedTable      = "42P01"
	undefinedColumn     = "42703"
	undefinedFunction   = "42883"
	wrongPassword       = "28P01"
	wrongAuthorization  = "28000"
	noSuchDatabase      = "3D000"
	lacksPrivilege      = "42501"
	tooManyConnections  = "53300"
	noSuchSchema        = "3F000"
)

// hasCode reports whether err is an error of the database with that SQLSTATE.
func hasCode(err error, code string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == code
}

// An errorClass says what repeating a failed statement can bring.
type errorClass int

const (
	// errorPassing: waiting helps. The database is away or busy, or an operator has to change a setting or a right.
	errorPassing errorClass = iota
	// errorDamaged: a page or a file cannot be read, or a limit of the server is met (SQLSTATE classes XX, 58 and 54).
	// Another try may help, waiting does not.
	errorDamaged
	// errorRefused: a constraint or a trigger is against a row (22, 23, 38, 39, 44, P0), or another session keeps a lock.
	errorRefused
)

// classifyError returns the class of a failed statement; nil and errors of the connection are errorPassing.
func classifyError(err error) errorClass {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || len(pgErr.Code) != 5 {
		return errorPassing
	}
	switch pgErr.Code[:2] {
	case "54", "58", "XX":
		return errorDamaged
	case "22", "23", "38", "39", "44", "P0":
		return errorRefused
	}
	if pgErr.Code == lockNotAvailable {
		return errorRefused
	}
	return errorPassing
}

// refusedByPooler reports whether an error is a pooler's, about what it does not keep. PgBouncer gives most of its own
// errors one SQLSTATE, also those that pass.
func refusedByPooler(err *pgconn.PgError) bool {
	return err.Code == protocolViolation &&
		(strings.Contains(err.Message, "startup parameter") || strings.Contains(err.Message, "statement pooling mode"))
}

// schemaMayDiffer reports whether an error may come from a schema that is not the one this build knows.
func schemaMayDiffer(err error) bool {
	return hasCode(err, undefinedTable) || hasCode(err, undefinedColumn) || hasCode(err, undefinedFunction) || hasCode(err, noSuchSchema)
}

// ErrTwoDatabases says that a relay's session and its pool lead to different databases.
var ErrTwoDatabases = errors.New("database.url and database.listen_url lead to different databases")

// hintFor says what a person can do about a failed statement; empty: nothing but wait.
func hintFor(err error) string {
	var pgErr *pgconn.PgError
	switch {
	case errors.Is(err, errReadOnly), hasCode(err, readOnlyTransaction):
		return "waiting for a server that takes writes; with several hosts in database.url, target_session_attrs=read-write finds it"
	case errors.Is(err, ErrTwoDatabases):
		return "database.listen_url must lead to the same database as database.url, past the pooler"
	case hasCode(err, wrongPassword), hasCode(err, wrongAuthorization):
		return "the server refuses this login: check user and password in database.url"
	case hasCode(err, noSuchDatabase):
		return "the server has no such database: check the name in database.url"
	case hasCode(err, lacksPrivilege):
		return "the role lacks a right: run migrations/roles.sql and grant it outbox_relay"
	case hasCode(err, tooManyConnections):
		return "the server has no connection left: a relay needs four"
	case errors.As(err, &pgErr) && (strings.HasPrefix(pgErr.Code, "XX") || strings.HasPrefix(pgErr.Code, "58")):
		return "the server cannot read or write some of its own data: see its log, check the disk, and run pg_amcheck; a damaged index is mended by REINDEX"
	case errors.As(err, &pgErr) && (strings.HasPrefix(pgErr.Code, "23") || strings.HasPrefix(pgErr.Code, "P0")):
		return "a constraint or trigger that does not belong to the outbox stands on its tables: drop it, or let it pass what relays write"
	case errors.As(err, &pgErr) && refusedByPooler(pgErr):
		return "a connection pooler stands before the server: set database.pooler to auto or transaction, and database.listen_url past it"
	}
	return ""
}
