package control

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/internal/check"
	"github.com/outbox-relay/outbox-relay/internal/pg"
	"github.com/outbox-relay/outbox-relay/internal/plain"
	"github.com/outbox-relay/outbox-relay/internal/relay/ops"
)

// A Problem is an error as API and page show it.
type Problem struct {
	Status int
	// Kind is a stable name of the problem.
	Kind, Title string
	// Detail says what to do. It holds no text of the database, which may hold values.
	Detail string
}

// ErrReadOnly says that a caller's role changes nothing, and ErrNoPayloads that it sees no
// payloads.
var (
	ErrReadOnly   = errors.New("the role may only read")
	ErrNoPayloads = errors.New("the role may not see payloads")
)

// KindDatabase is the Kind of a problem of a database that is away, or does not answer.
const KindDatabase = "database"

// pingTimeout bounds how long a database that works takes to connect and answer at least.
const pingTimeout = time.Second

// Problem is [ProblemOf], and finds out whether a question that was given up asked too much, or met
// a database that answers nothing.
func (c *Control) Problem(ctx context.Context, err error) (p Problem, unexpected bool) {
	p, unexpected = ProblemOf(err)
	if p.Kind != kindTooMuch || errors.As(err, new(*pgconn.PgError)) {
		return p, unexpected
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pingTimeout)
	defer cancel()
	if _, pingErr := c.Outbox.Now(ctx); pingErr != nil {
		return Problem{
			http.StatusServiceUnavailable, KindDatabase, "The database does not answer",
			"The relay waits for it and continues by itself; nothing is lost. Check the load and the disk of PostgreSQL, and the network in between.",
		}, true
	}
	return p, unexpected
}

const kindTooMuch = "too-much"

// ProblemOf returns what a client should know of an error, and whether the log should have the
// rest.
func ProblemOf(err error) (p Problem, unexpected bool) {
	var mistake check.Problem
	var event ops.UnknownEvent
	var server *pgconn.PgError
	switch {
	case errors.As(err, &mistake):
		return Problem{http.StatusUnprocessableEntity, "invalid", "The request has a mistake", mistake.Error()}, false
	case errors.Is(err, ErrReadOnly):
		return Problem{http.StatusForbidden, "forbidden", "Your role may only read", "Sign in with admin.token to change something."}, false
	case errors.Is(err, ErrNoPayloads):
		return Problem{http.StatusForbidden, "forbidden", "Your role may not see payloads", "Only who signs in with admin.token may. Without that setting payloads are shown to no caller."}, false
	case errors.Is(err, ops.ErrUnknownDestination):
		return Problem{http.StatusNotFound, "unknown-destination", "There is no such destination", "No route, no state and no waiting delivery has that name."}, false
	case errors.Is(err, ops.ErrNoAlert):
		return Problem{http.StatusNotFound, "unknown-alert", "No such alert is open", "It has ended, or was never there."}, false
	case errors.Is(err, ops.ErrUnknownRule):
		return Problem{http.StatusUnprocessableEntity, "unknown-rule", "There is no such rule of alerts", err.Error()}, false
	case errors.As(err, new(ops.UnknownSubject)):
		return Problem{http.StatusUnprocessableEntity, "unknown-subject", "There is nothing of this name to be silent about", plain.Capital(err.Error()) + "."}, false
	case errors.Is(err, ops.ErrNoAuditEntry):
		return Problem{http.StatusNotFound, "unknown-operation", "There is no such operation", "The audit has no entry of that number."}, false
	case errors.As(err, &event):
		return Problem{http.StatusNotFound, "unknown-event", "There is no such event", plain.Capital(event.Detail) + "."}, false
	case errors.Is(err, ErrNotRunning):
		return Problem{http.StatusConflict, "not-running", "This relay does not work on the operation", "It has ended, or another relay works on it."}, false
	case errors.Is(err, ErrNotConfirmed):
		return Problem{http.StatusConflict, "not-confirmed", "The order is not confirmed", err.Error()}, false
	case errors.Is(err, ops.ErrNotResumable):
		return Problem{http.StatusConflict, "not-resumable", "The operation cannot continue", err.Error()}, false
	case errors.Is(err, ErrBusy):
		return Problem{http.StatusServiceUnavailable, "busy", "Other operations run", err.Error()}, false
	case errors.Is(err, pg.ErrSchema):
		return Problem{http.StatusServiceUnavailable, "schema", "The database has another schema", "Run: outbox-relay migrate up"}, false
	case errors.As(err, &server):
		p = ofServer(server)
		if p.Kind == "internal" && errors.As(err, new(*pgconn.ConnectError)) { // no such database, another password
			p = unreachable()
		}
		return p, p.Status != http.StatusUnprocessableEntity
	case errors.Is(err, context.DeadlineExceeded) && !errors.As(err, new(*pgconn.ConnectError)):
		return tooMuch(), false
	case errors.Is(err, context.Canceled):
		return Problem{499, "canceled", "The request was given up", ""}, false
	}
	return unreachable(), true
}

func unreachable() Problem {
	return Problem{
		http.StatusServiceUnavailable, KindDatabase, "The database cannot be reached",
		"The relay waits for it and continues by itself; nothing is lost. Check that PostgreSQL runs and that database.url is right.",
	}
}

func tooMuch() Problem {
	return Problem{http.StatusServiceUnavailable, kindTooMuch, "That takes too long", "The question was ended to protect the database. Narrow it: add a destination, a status or a time. If there is nothing to narrow, a lock may hold it up: outbox-relay doctor."}
}

func ofServer(server *pgconn.PgError) Problem {
	switch server.Code {
	case "42501": // insufficient_privilege
		return Problem{http.StatusServiceUnavailable, "rights", "A right is missing", "Run migrations/roles.sql again after an upgrade, and grant outbox_relay to the relay's login."}
	case "22021", "22P05": // a NUL, or bytes that are no UTF-8
		return Problem{http.StatusUnprocessableEntity, "invalid", "The request has a mistake", "A text holds a NUL, or is not UTF-8."}
	case "42P01": // undefined_table
		return Problem{http.StatusServiceUnavailable, "schema", "The database has another schema", "Run: outbox-relay migrate up"}
	case pg.LockNotAvailable:
		return Problem{http.StatusServiceUnavailable, "locked", "A table is locked", "Another session keeps it locked, and outbox-relay doctor names it."}
	case "57014": // query_canceled: the statement timeout of the page
		return tooMuch()
	case "57P01", "57P02", "57P03", "53300": // shutdown, crash, starting up, too many connections
		return Problem{http.StatusServiceUnavailable, KindDatabase, "The database refuses connections", "It is stopping, starting, or has too many connections. The relay waits for it and continues by itself."}
	}
	return Problem{http.StatusInternalServerError, "internal", "The database refused a statement", "The log of the relay says which, with SQLSTATE " + server.Code + "."}
}
