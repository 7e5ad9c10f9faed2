package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// ErrKeyReused reports that an idempotency key already names another event. Roll the transaction
// back: the other events of the call may have been inserted. [KeyReusedError] tells which key and
// what differs.
var ErrKeyReused = errors.New("outbox: idempotency key holds another event")

// A KeyReusedError is one event whose key is taken by an event of other content. [Enqueue] joins
// one for each; all of them match [ErrKeyReused].
type KeyReusedError struct {
	Index          int      // the event's position among the arguments, from 0
	IdempotencyKey string   // that is taken
	Fields         []string // the fields of Event that differ
}

// Error names the event and the fields that differ, never their values.
func (e *KeyReusedError) Error() string {
	return fmt.Sprintf("outbox: event %d (%s): IdempotencyKey: holds another event, which differs in %s; roll back",
		e.Index, quote(e.IdempotencyKey), strings.Join(e.Fields, ", "))
}

// Unwrap returns [ErrKeyReused].
func (e *KeyReusedError) Unwrap() error { return ErrKeyReused }

// A Result tells what became of the events of one call: each was either inserted or a duplicate.
type Result struct {
	// Inserted is the number of new events.
	Inserted int
	// Duplicates are the keys of the events that were there already with the same content, in the
	// order given. Nothing was written for them. An event given twice in one call is its own
	// duplicate.
	Duplicates []string
}

// A Producer is [Enqueue] and [EnqueueSQL] with options. The zero value is what those functions
// use. It is safe for concurrent use if its hook is.
type Producer struct {
	// EventHeaders are headers that events may have beside the usual ones (content-*, traceparent,
	// tracestate, baggage, ce-*, x-event-*): names, and prefixes that end with a star, as
	// event_headers of the destinations has them. Others are refused.
	EventHeaders []string

	// TraceHeaders returns the trace context of ctx: traceparent, tracestate and baggage, the
	// headers of the W3C. They are added to every event of the call, unless the event brings any of
	// the three itself, and do not count as content when a repeated event is compared. Tracing
	// never fails a business operation: other names, values that are not printable ASCII and what
	// would exceed the limit of Headers are left out. Nil: no trace context.
	//
	// With OpenTelemetry:
	//
	//	carrier := propagation.MapCarrier{}
	//	propagation.TraceContext{}.Inject(ctx, carrier)
	//	return carrier
	TraceHeaders func(ctx context.Context) map[string]string
}

// Enqueue inserts events into the table outbox within tx: they are committed with the business
// change or not at all. They are numbered in the order given, in one statement however many they
// are.
//
// An event whose key exists already with the same content (all fields but AvailableAt and the trace
// headers) is a duplicate: nothing is written and no error reported. With other content the error
// is [ErrKeyReused]. If another transaction is just inserting the key, Enqueue waits for its end.
//
// The error is one or more [*ValidationError] before the database is touched. After any other error
// roll back: PostgreSQL will refuse to continue, or, after [ErrKeyReused], some events may have
// been inserted. Errors of the driver are wrapped; in a transaction above READ COMMITTED a key that
// was committed meanwhile is SQLSTATE 40001, and the whole transaction can be tried again.
//
// The role outbox_producer is enough: INSERT on outbox, and the function outbox_compare_events for
// duplicates.
func Enqueue(ctx context.Context, tx pgx.Tx, events ...Event) (Result, error) {
	return Producer{}.Enqueue(ctx, tx, events...)
}

// EnqueueSQL is [Enqueue] for a transaction of database/sql, whatever its PostgreSQL driver.
func EnqueueSQL(ctx context.Context, tx *sql.Tx, events ...Event) (Result, error) {
	return Producer{}.EnqueueSQL(ctx, tx, events...)
}

// Enqueue is the function [Enqueue] with p's options.
func (p Producer) Enqueue(ctx context.Context, tx pgx.Tx, events ...Event) (Result, error) {
	return p.enqueue(ctx, pgxTx{tx}, events)
}

// EnqueueSQL is the function [EnqueueSQL] with p's options.
func (p Producer) EnqueueSQL(ctx context.Context, tx *sql.Tx, events ...Event) (Result, error) {
	return p.enqueue(ctx, sqlTx{tx}, events)
}

func (p Producer) enqueue(ctx context.Context, tx transaction, events []Event) (Result, error) {
	b, err := newBatch(events, append(webhook.DefaultEventHeaders(), p.EventHeaders...))
	if err != nil || len(b.events) == 0 {
		return Result{}, err
	}
	if p.TraceHeaders != nil {
		b.addTrace(p.TraceHeaders(ctx))
	}
	arguments := b.arguments()
	inserted, err := insertEvents(ctx, tx, arguments)
	if err != nil {
		return Result{}, err
	}
	if inserted < len(b.events) {
		stored, err := compareEvents(ctx, tx, arguments)
		if err != nil {
			return Result{}, err
		}
		if err := b.judge(inserted, stored); err != nil {
			return Result{}, err
		}
	}
	return Result{Inserted: inserted, Duplicates: b.duplicates()}, nil
}

// Arrays make it one statement for any number of events. There is no ORDER BY, which would sort the
// payloads: a function scan returns the rows, and so assigns the ids, in the order of the arrays.
//
// ON CONFLICT names no target and nothing is returned, because either would need the right to
// SELECT.
const insertEventsSQL = `
INSERT INTO outbox (event_type, event_version, payload, idempotency_key, ordering_key, related_reference, headers, available_at)
SELECT e.event_type, e.event_version, e.payload, e.idempotency_key, e.ordering_key, e.related_reference, e.headers,
       coalesce(e.available_at, now())
FROM unnest($1::text[], $2::integer[], $3::json[], $4::text[], $5::text[], $6::text[], $7::jsonb[], $8::timestamptz[])
     AS e (event_type, event_version, payload, idempotency_key, ordering_key, related_reference, headers, available_at)
ON CONFLICT DO NOTHING`

// insertEvents returns how many of the events are new.
func insertEvents(ctx context.Context, tx transaction, arguments []any) (int, error) {
	inserted, err := tx.exec(ctx, insertEventsSQL, arguments)
	if err != nil {
		return 0, fmt.Errorf("outbox: insert events: %w%s", err, hint(err, "grant outbox_producer to the role, see migrations/roles.sql"))
	}
	return int(inserted), nil
}

// The function reads the events that hold the keys, which a producer may not. It is that of the
// schema that holds the table.
const compareEventsSQL = `
SELECT number, found, written_by, differs
FROM outbox_compare_events($1::text[], $2::integer[], $3::json[], $4::text[], $5::text[], $6::text[], $7::jsonb[])`

// compareEvents returns what is stored under the keys of the events. In READ COMMITTED it sees a
// row that was committed after insertEvents had begun.
func compareEvents(ctx context.Context, tx transaction, arguments []any) ([]stored, error) {
	var rows []stored
	err := tx.query(ctx, compareEventsSQL, arguments[:7], func(scan func(...any) error) error {
		var row stored
		var differs string
		if err := scan(&row.position, &row.found, &row.writtenBy, &differs); err != nil {
			return err
		}
		if differs != "" {
			row.differs = strings.Split(differs, ",")
			for i, column := range row.differs {
				row.differs[i] = fieldOf(column)
			}
		}
		rows = append(rows, row)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("outbox: compare events whose keys exist: %w%s", err,
			hint(err, "grant outbox_producer to the role, see migrations/roles.sql"))
	}
	return rows, nil
}

// fieldOf returns the field of Event that a column of the table outbox holds.
func fieldOf(column string) string {
	switch column {
	case "event_type":
		return "Type"
	case "event_version":
		return "Version"
	case "payload":
		return "Payload"
	case "ordering_key":
		return "OrderingKey"
	case "related_reference":
		return "RelatedReference"
	case "headers":
		return "Headers"
	}
	return column
}

// hint says what to do about an error. Every driver's error has the method SQLState.
func hint(err error, onDenied string) string {
	var state interface{ SQLState() string }
	if errors.As(err, &state) {
		switch state.SQLState() {
		case "42P01", "42883": // undefined_table, undefined_function
			return "; run outbox-relay migrate up, or put the schema of the outbox on the search_path"
		case "42501": // insufficient_privilege
			return "; " + onDenied
		}
	}
	return ""
}

// A transaction is what the two statements need of pgx.Tx and *sql.Tx.
type transaction interface {
	exec(ctx context.Context, statement string, arguments []any) (affected int64, err error)
	query(ctx context.Context, statement string, arguments []any, each func(scan func(...any) error) error) error
}

type pgxTx struct{ tx pgx.Tx }

func (t pgxTx) exec(ctx context.Context, statement string, arguments []any) (int64, error) {
	tag, err := t.tx.Exec(ctx, statement, arguments...)
	return tag.RowsAffected(), err
}

func (t pgxTx) query(ctx context.Context, statement string, arguments []any, each func(func(...any) error) error) error {
	rows, err := t.tx.Query(ctx, statement, arguments...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := each(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

type sqlTx struct{ tx *sql.Tx }

func (t sqlTx) exec(ctx context.Context, statement string, arguments []any) (int64, error) {
	result, err := t.tx.ExecContext(ctx, statement, arguments...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

func (t sqlTx) query(ctx context.Context, statement string, arguments []any, each func(func(...any) error) error) error {
	rows, err := t.tx.QueryContext(ctx, statement, arguments...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := each(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}
