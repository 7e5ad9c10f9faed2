package pg

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// sessionSettings are what the engine's statements rest on, whatever role and database say.
var sessionSettings = map[string]string{
	"application_name": "outbox-relay",
	"client_encoding":  "UTF8",
	// pgx reads a time that comes as text in this style alone; role, database or server may have
	// another.
	"datestyle": "ISO, MDY", // as most servers have it: no change that they would report
	// And it returns such a time with the offset of this zone.
	"timezone": "UTC",
	// A backslash in a string of the engine's statements stands for itself.
	"standard_conforming_strings": "on",
	// A statement's own snapshot, always fresh: FOR UPDATE SKIP LOCKED would fail under stricter
	// levels.
	"default_transaction_isolation": "read committed",
	// Losing a claim, a delivered or a retry in a crash of the server only costs a duplicate; what
	// must not be lost switches it on again.
	"synchronous_commit": "off",
	// Plans are prepared once, often on an empty table, where a sequential scan looks cheap; it
	// would stay for ever.
	"plan_cache_mode":   "force_generic_plan",
	"enable_seqscan":    "off",
	"enable_hashjoin":   "off",
	"enable_mergejoin":  "off",
	"enable_bitmapscan": "off",
	"enable_memoize":    "off",
	"jit":               "off",
	"statement_timeout": "30000",
	// A relay that stands still in a transaction, its host suspended, keeps the locks it has from
	// the others no longer.
	"idle_in_transaction_session_timeout": "10000",
	// The session of an idle relay is silent between two beats. Without it the relay looks dead.
	"idle_session_timeout": "0",
	// A row that another session keeps locked must not keep a settle, and with it all destinations.
	"lock_timeout": "200",
	// The server notices a relay's host that vanished without closing its connections.
	"tcp_keepalives_idle":     "2",
	"tcp_keepalives_interval": "1",
	"tcp_keepalives_count":    "3",
	// It also ends the connection of a relay that stands still and does not read an answer. Its
	// kernel acknowledges keepalives, and no other timeout ends a statement that is sending: the
	// claim's rows would stay locked for as long.
	"tcp_user_timeout": "5000",
}

// What surrounds each statement where sessions do not last. All of it ends with the transaction.
const (
	beginTransaction    = `BEGIN ISOLATION LEVEL READ COMMITTED`
	commitTransaction   = `COMMIT`
	rollbackTransaction = `ROLLBACK`
	// count calls set_config for each, and sends back a single number. Names are qualified:
	// search_path is the role's own still. An unnest of two arrays is always pg_catalog's.
	SetForTransaction = `SELECT pg_catalog.count(pg_catalog.set_config(s.name, s.value, true)) FROM unnest($1::pg_catalog.text[], $2::pg_catalog.text[]) AS s (name, value)`
)

// ErrPooler says that a connection pooler stands before the server and cannot be worked with, or
// not as configured. One in transaction mode hands every transaction to another server connection:
// none is the relay's session, LISTEN never fires, and the settings on which the plans rest do not
// arrive.
var ErrPooler = errors.New("the database URL leads through a connection pooler that does not keep sessions (PgBouncer?)")

// ErrReadOnly says that the server is a standby, or was told to be read-only.
var ErrReadOnly = errors.New("this server takes no writes: it is a standby, or read-only")

// ErrEncoding says that a database is not in UTF-8. One event whose text cannot be converted would
// keep all others from being taken, and an answer that cannot be would never be written.
var ErrEncoding = errors.New("the outbox needs a database in UTF8")

// CheckEncoding returns an error that wraps [ErrEncoding] if that is not the given one.
func CheckEncoding(encoding string) error {
	if encoding == "UTF8" {
		return nil
	}
	return fmt.Errorf("%w, and this one is in %s; make one by CREATE DATABASE … TEMPLATE template0 ENCODING 'UTF8', and move the tables there by pg_dump", ErrEncoding, encoding)
}

const selectSettingsKept = `
SELECT pg_catalog.bool_and(pg_catalog.current_setting(wanted.name) = wanted.value), pg_catalog.pg_is_in_recovery() OR pg_catalog.current_setting('transaction_read_only') = 'on',
    pg_catalog.current_setting('server_encoding')
FROM (VALUES ('plan_cache_mode', 'force_generic_plan'), ('enable_seqscan', 'off'), ('synchronous_commit', 'off')) wanted (name, value)`

// CheckSession returns ErrPooler if a session is not what it seems: PgBouncer refuses unknown
// settings at the start of a connection or, told to ignore them, drops them. It returns
// [ErrReadOnly] if nothing can be written, and one that wraps [ErrEncoding] for a database that is
// not in UTF-8.
func CheckSession(ctx context.Context, db DB) error {
	ctx, cancel := context.WithTimeout(ctx, StatementTimeout)
	defer cancel()
	var kept, readOnly bool
	var encoding string
	err := db.QueryRow(ctx, selectSettingsKept, pgx.QueryExecModeExec).Scan(&kept, &readOnly, &encoding)
	var pgErr *pgconn.PgError
	switch {
	case errors.As(err, &pgErr) && refusedByPooler(pgErr):
		return fmt.Errorf("%w: %s", ErrPooler, pgErr.Message)
	case err != nil:
		return fmt.Errorf("check session: %w", err)
	case !kept:
		return fmt.Errorf("%w: settings are lost", ErrPooler)
	case readOnly:
		return ErrReadOnly
	}
	return CheckEncoding(encoding)
}
