package cli

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/inboxops"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/settings"
)

// Exit codes. They are promises. A health check ends with ExitFailed, as Docker wants it.
const (
	ExitFailed      = 1
	ExitUsage       = 2
	ExitConfig      = 3
	ExitDatabase    = 4 // the database cannot be reached
	ExitSchema      = 5 // it has another schema than this build works with
	ExitFound       = 6 // the command did its work and found something
	ExitInterrupted = 130
)

// ExitError is an error that decides the exit code.
type ExitError struct {
	Code int
	Err  error
}

func (e ExitError) Error() string { return e.Err.Error() }

func (e ExitError) Unwrap() error { return e.Err }

// Usagef returns an error about how the command was called.
func Usagef(format string, args ...any) error {
	return ExitError{Code: ExitUsage, Err: fmt.Errorf(format, args...)}
}

// Foundf returns the finding of a command whose findings are its result, such as doctor.
func Foundf(format string, args ...any) error {
	return ExitError{Code: ExitFound, Err: fmt.Errorf(format, args...)}
}

// report prints an error on stderr, so that no exit code but 0 stands alone, and returns the code.
func report(stderr io.Writer, err error) int {
	if err == nil {
		return 0
	}
	var exit ExitError
	var mistakes settings.Error
	switch {
	case errors.As(err, &mistakes):
		fmt.Fprintln(stderr, mistakes)
		return ExitConfig
	case errors.As(err, &exit):
	case errors.Is(err, pg.ErrPooler), errors.Is(err, pg.ErrEncoding), errors.Is(err, pg.ErrSuperuser):
		exit.Code = ExitConfig
	case errors.Is(err, pg.ErrSchema), errors.Is(err, inboxops.ErrSchema):
		exit.Code = ExitSchema
	case refused(err) != "":
		exit.Code, err = ExitConfig, fmt.Errorf("%s: %w", refused(err), err)
	case unreachable(err):
		exit.Code, err = ExitDatabase, fmt.Errorf("the database cannot be reached: %w", err)
	default:
		exit.Code, err = ExitFailed, withLackingRight(err)
	}
	fmt.Fprintf(stderr, "outbox-relay: %s\n", OneLine(err.Error()))
	return exit.Code
}

// refused says what the server has against a login, which another attempt does not change; empty:
// nothing.
func refused(err error) string {
	var connect *pgconn.ConnectError
	var server *pgconn.PgError
	if !errors.As(err, &connect) || !errors.As(err, &server) {
		return ""
	}
	switch server.Code {
	case "28P01", "28000": // invalid_password, invalid_authorization_specification
		return "the database refuses this login; check user and password in database.url, and pg_hba.conf"
	case "3D000": // invalid_catalog_name
		return "there is no such database; check its name in database.url"
	case "42501": // insufficient_privilege
		return "this login may not connect to the database; GRANT CONNECT ON DATABASE to it"
	case "08P01": // protocol_violation, as which PgBouncer reports most of what it does not like
		if strings.Contains(server.Message, "startup parameter") {
			return "a connection pooler stands before the database; set database.listen_url to a direct connection"
		}
	}
	return ""
}

// withLackingRight adds which right the login of a command lacks, where the error does not say so
// itself.
func withLackingRight(err error) error {
	var server *pgconn.PgError
	switch {
	case errors.As(err, &server) && server.Code == "42P01": // undefined_table
		return fmt.Errorf("%w; the tables are not where this login looks: run outbox-relay migrate up, or name their schema with --schema", err)
	case !errors.As(err, &server) || server.Code != "42501" || strings.Contains(strings.ToLower(err.Error()), "grant "): // insufficient_privilege
		return err
	case strings.Contains(server.Message, "for schema"), strings.Contains(server.Message, "for database"), strings.HasPrefix(server.Message, "must be owner"):
		return fmt.Errorf("%w; migrate as the owner of the tables, who needs CREATE on the schema (on the database, to make a schema)", err)
	}
	return fmt.Errorf("%w; this login needs a role of migrations/roles.sql: outbox_reader to look, outbox_relay to change something; only the owner of the tables migrates", err)
}

// unreachable reports whether err means that the database did not answer, or refused to talk.
func unreachable(err error) bool {
	var connect *pgconn.ConnectError
	var server *pgconn.PgError
	switch {
	case errors.As(err, &connect), errors.Is(err, io.ErrUnexpectedEOF), pgconn.Timeout(err):
		return true
	case errors.As(err, &server):
		// 08: connection exceptions; 57P01 to 57P03: it is shutting down or starting up.
		return strings.HasPrefix(server.Code, "08") || strings.HasPrefix(server.Code, "57P0")
	}
	return false
}

// OneLine joins the lines of a text and drops repeated ones: pgx tells of every address and TLS
// mode that it tried.
func OneLine(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line != "" && (len(lines) == 0 || lines[len(lines)-1] != line) {
			lines = append(lines, line)
		}
	}
	joined := strings.Join(lines, "; ")
	return output.Printable(strings.ReplaceAll(joined, ":; ", ": "))
}
