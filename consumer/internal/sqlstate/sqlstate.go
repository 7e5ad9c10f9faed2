// Package sqlstate reads the codes of PostgreSQL's errors, through pgx and any driver of
// database/sql.
package sqlstate

import "errors"

// Codes on which a decision depends.
const (
	SerializationFailure  = "40001"
	DeadlockDetected      = "40P01"
	CheckViolation        = "23514"
	LockNotAvailable      = "55P03"
	InFailedTransaction   = "25P02"
	QueryCanceled         = "57014"
	DivisionByZero        = "22012"
	UndefinedTable        = "42P01"
	UndefinedColumn       = "42703"
	UndefinedFunction     = "42883"
	InsufficientPrivilege = "42501"
)

// Of returns the code of an error, and "" for an error that has none.
func Of(err error) string {
	if stated, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err); ok {
		return stated.SQLState()
	}
	return ""
}

// IsConflict reports whether the same transaction may well succeed when it is run again.
func IsConflict(err error) bool {
	code := Of(err)
	return code == SerializationFailure || code == DeadlockDetected
}
