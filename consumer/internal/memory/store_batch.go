package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outbox-relay/outbox-relay/consumer/internal/handlerctx"
	"github.com/outbox-relay/outbox-relay/consumer/internal/sqlstate"
)

// ErrBatchBroken says that the transaction of a batch has ended, or that its connection is lost, so
// that no event of it commits.
var ErrBatchBroken = errors.New("the transaction of the batch has ended")

// errLeftBehind ends a batch. It is never reported.
var errLeftBehind = errors.New("the handler before has left something in the transaction of the batch")

// A Batcher is a memory that can hold the events of a batch in one transaction.
type Batcher interface {
	// Batch returns the memory of one batch, which is for one goroutine at a time. What it admits
	// and remembers is a savepoint of its transaction, which begins with the first event.
	Batch() Batch
}

// A Batch is the memory of one batch. Its answers may be sent once Commit has succeeded.
type Batch interface {
	Memory
	// Commit commits what was remembered, and fails if a handler has ended the transaction, or left
	// it unfit.
	Commit(ctx context.Context) error
	// Ended reports whether the last Admit failed behind another event of the batch. That one, or
	// the connection that it was given, may be why: the event is for the next batch, in another
	// transaction.
	Ended() bool
	// Rollback gives the batch up, unless it was committed.
	Rollback()
}

// Batch returns the memory of one batch; nil: the database is not one of pgx, and batches are not
// known to this memory.
func (m *inDatabase) Batch() Batch {
	db, ok := m.db.(*PgxDatabase)
	if !ok {
		return nil
	}
	points := &savepoints{PgxDatabase: db}
	own := *m
	own.db, own.admission = points, admitBehindSQL
	return &batch{inDatabase: &own, points: points}
}

// batch is a memory whose events are savepoints.
type batch struct {
	*inDatabase
	points    *savepoints
	last      *held // the last one that was remembered
	unchecked *held // the same, until another is admitted in its transaction
	ended     bool
}

// Admit admits an event behind those before it, if they have left the transaction as it was found.
func (b *batch) Admit(ctx context.Context, rq *Request) (Found, error) {
	behind := b.points.tx != nil
	found, err := b.inDatabase.Admit(ctx, rq)
	h, ok := found.Held.(*held)
	switch {
	case ok && behind && (b.points.changed || b.last != nil && b.last.xact != h.xact):
		h.Transaction.Rollback()
		err = errLeftBehind
	case err != nil && b.points.tx != nil && !sqlstate.IsConflict(err):
		b.points.tx.handler.spoiled.Store(true) // what is wrong may be the connection, as where an event comes alone
	}
	if err != nil {
		b.ended = behind && !sqlstate.IsConflict(err)
		return Found{}, err
	}
	if ok {
		b.unchecked = nil
		found.Held = &heldInBatch{held: h, batch: b}
	}
	return found, nil
}

// emptySQL is the last statement of a batch for which no handler was called.
const emptySQL = `SELECT 1`

// nothingSQL is the last statement of a batch of which nothing is remembered.
const nothingSQL = LastHead + `1` + AsFound + `$1` + RoleAsFound + `$2` + LastEnd

// Commit commits the batch. The last statement is that of the last event that was remembered: it
// fails in any other transaction.
func (b *batch) Commit(ctx context.Context) (err error) {
	t := b.points.tx
	switch {
	case t == nil:
		return nil // nothing was begun
	case b.points.broken():
		b.Rollback() // whose connection must not be waited for while it is held
		err = ErrBatchBroken
	case b.points.found.Table == "": // no handler was called
		return committed(t.Commit(ctx, emptySQL, nil))
	case b.last == nil: // nothing to keep but what was learned of duplicates
		return committed(t.Commit(ctx, nothingSQL, nil))
	default:
		err = t.Commit(ctx, b.last.table.end, []any{b.last.xact, b.Receiver, b.Source, b.last.key})
	}
	if b.unchecked != nil && (errors.Is(err, ErrBatchBroken) || isHandlers(err)) {
		err = b.unchecked.ended(err)
	}
	return committed(err)
}

// Ended reports whether the event of the last Admit is for another batch.
func (b *batch) Ended() bool { return b.ended }

// Rollback ends what Commit has not ended.
func (b *batch) Rollback() {
	if b.points.tx != nil {
		b.points.tx.Rollback()
	}
}

// heldInBatch is an event that is remembered when its batch is.
type heldInBatch struct {
	*held
	batch *batch
}

// Remember keeps the status, if it is not the one that is kept already, and leaves the commit to
// the batch.
func (h *heldInBatch) Remember(ctx context.Context, status int, ignored string) error {
	point := h.Transaction.(*savepoint)
	if err := point.unfit(); err != nil {
		return committed(h.undo(err))
	}
	if status != http.StatusNoContent || ignored != "" {
		query, args := h.answer(status, ignored)
		var asFound any
		if err := point.of.tx.QueryRow(ctx, query, append(args, point.of.found.SearchPath, point.of.found.Role)).Scan(&asFound); err != nil {
			return committed(h.undo(Lost(err)))
		}
	}
	point.of.changed = point.view.declared.Load()
	point.release = true
	h.batch.last, h.batch.unchecked = h.held, h.held
	return nil
}

// undo gives the event up because of err, and returns what to report.
func (h *heldInBatch) undo(err error) error {
	if !h.Rollback() && !errors.Is(err, ErrEnded) {
		return fmt.Errorf("%w: %w", ErrEnded, err)
	}
	return err
}

// Rollback gives the event up. It reports false when the handler has committed the batch's
// transaction itself.
func (h *heldInBatch) Rollback() bool {
	h.Transaction.Rollback()
	if !h.batch.points.broken() {
		return true
	}
	h.batch.Rollback() // whose connection must not be waited for while it is held
	return !errors.Is(h.noteEnded(), ErrEnded)
}

// savepoints is a database whose transactions are savepoints of one.
type savepoints struct {
	*PgxDatabase
	tx      *PgxTransaction // nil until the first event
	found   Surroundings
	current *savepoint
	gone    bool // the transaction is not the batch's any more
	changed bool // the surroundings are not as found
}

// broken reports whether the transaction can no longer be used.
func (s *savepoints) broken() bool {
	if s.gone {
		return true // the connection may be another's already
	}
	conn := s.tx.conn.Conn()
	return conn.IsClosed() || conn.PgConn().IsBusy() || conn.PgConn().TxStatus() != 'T'
}

// Begin makes a savepoint, or the transaction, and runs the statement in the same round trip. The
// savepoint before it is released by it.
func (s *savepoints) Begin(ctx context.Context, scan func(pgx.Row) error, query string, args []any) (Transaction, error) {
	if s.tx == nil {
		conn, err := s.Pool.Acquire(ctx)
		if err != nil {
			return nil, err
		}
		b := &pgx.Batch{}
		b.BeginTx(s.Options)
		results := conn.SendBatch(ctx, b)
		err = results.Close()
		s.tx = Lend(conn, results.Tx(), s.Timeout)
		if err != nil {
			s.gone = true
			return nil, err
		}
	}
	if s.broken() {
		return nil, ErrBatchBroken
	}
	b := &pgx.Batch{}
	if s.current != nil && s.current.release {
		b.Queue("RELEASE SAVEPOINT outbox_event")
	}
	made := false
	b.Queue("SAVEPOINT outbox_event").Exec(func(pgconn.CommandTag) error { made = true; return nil })
	b.Queue(query, args...).QueryRow(scan)
	err := s.tx.conn.SendBatch(ctx, b).Close()
	if !made { // the name is still the savepoint's of the event before, which is remembered
		return nil, cmp.Or(err, ErrBatchBroken)
	}
	s.current = &savepoint{of: s, view: &handlerTx{inner: s.tx.tx, ending: &ending{}}}
	return s.current, err
}

// savepoint is the transaction of one event of a batch.
type savepoint struct {
	of      *savepoints
	view    *handlerTx
	release bool // remembered: it is released with the next one, or by the commit
	ended   bool
}

func (p *savepoint) QueryRow(ctx context.Context, query string, args []any) pgx.Row {
	return p.of.tx.QueryRow(ctx, query, args)
}

// Enter notes the surroundings of the first event: those of the connection, as it was found. Where
// another event finds others, the handler before it has left them.
func (p *savepoint) Enter(found Surroundings) {
	switch {
	case found.Table == "": // see batch.Admit
	case p.of.found.Table == "":
		p.of.found = found
		p.of.tx.Enter(found)
	case p.of.found != found || found.Role == "":
		p.of.changed = true
	}
}

func (p *savepoint) Attach(scope *handlerctx.Scope) { scope.Tx = p.view }

// Commit runs the statement. Only what is noted of a duplicate ends in this way.
func (p *savepoint) Commit(ctx context.Context, query string, args []any) error {
	_, err := p.of.tx.tx.Exec(ctx, query, args...)
	p.release = err == nil
	return err
}

// unfit closes the transaction to its handler, and returns why what the handler did cannot be kept.
func (p *savepoint) unfit() error {
	idle := p.view.close()
	if p.view.spoiled.Load() {
		p.of.tx.handler.spoiled.Store(true)
	}
	switch conn := p.of.tx.conn.Conn().PgConn(); {
	case p.view.rolledBack.Load() || conn.TxStatus() == 'I':
		return ErrEnded
	case !idle || conn.IsBusy():
		p.of.gone = true
		return ErrRowsOpen
	case conn.TxStatus() != 'T':
		return ErrAborted
	}
	return nil
}

// Rollback rolls back to the savepoint. Where that fails, the batch is broken.
func (p *savepoint) Rollback() {
	if p.ended || p.release {
		return
	}
	p.ended = true
	_ = p.unfit()
	ctx, cancel := context.WithTimeout(context.Background(), p.of.Timeout)
	defer cancel()
	var tag pgconn.CommandTag
	var err error
	if conn := p.of.tx.conn.Conn(); conn.IsClosed() || conn.PgConn().IsBusy() || conn.PgConn().TxStatus() == 'I' {
		err = ErrBatchBroken
	} else {
		tag, err = p.of.tx.tx.Exec(ctx, "ROLLBACK TO SAVEPOINT outbox_event")
	}
	if err != nil || tag.String() != "ROLLBACK" {
		p.of.gone = true
	}
	p.release = true // of an empty savepoint, which the next one takes the place of
}
