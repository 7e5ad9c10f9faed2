package reconcile

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// A Receiver answers for what one receiver has of one sender, and for nothing else. It is safe for
// concurrent use.
type Receiver struct {
	Receiver, Source string
	// Effects is a query whose first column has the idempotency key of each effect, in one row for
	// each. Empty: effects are not counted. It is part of a statement, so it is the application's
	// or the operator's own, and never a sender's.
	Effects string
	// Read runs f in a transaction that only reads, and in which the receiver's tables are found.
	Read func(ctx context.Context, f func(pgx.Tx) error) error
	// ReadEffects is the same for Effects, whose tables are the application's.
	ReadEffects func(ctx context.Context, f func(pgx.Tx) error) error
}

// Bounds of one answer.
const (
	// sliceTime is how long a digest reads before it answers with what it has. The question is
	// asked again for the rest.
	sliceTime = 5 * time.Second
	// slicePages is how many pages of 8 KiB one statement reads: its snapshot must not hold back
	// vacuum.
	slicePages = 2048
	// effectsTimeout ends the count of effects, in milliseconds; statementTimeout every other
	// statement.
	effectsTimeout   = "300000"
	statementTimeout = "30000"
)

// Answer answers one question. The error wraps [ErrRequest] if the question is wrong.
func (r *Receiver) Answer(ctx context.Context, q Request) (a Answer, err error) {
	if err := q.check(); err != nil {
		return Answer{}, err
	}
	a = Answer{Receiver: r.Receiver, Source: r.Source, CountsEffects: r.Effects != ""}
	read, timeout := r.Read, statementTimeout
	var f func(context.Context, pgx.Tx, Request) ([]Held, error)
	switch q.Ask {
	case AskDescribe:
		f = func(ctx context.Context, tx pgx.Tx, _ Request) ([]Held, error) { return nil, r.describe(ctx, tx, &a) }
	case AskDigest:
		return a, r.digest(ctx, q, &a)
	case AskList:
		f = r.list
	case AskFind:
		f = r.find
	case AskUnfinished:
		f = r.unfinished
	case AskDoubled, AskMissing:
		if r.Effects == "" {
			return a, nil
		}
		schema, err := r.schema(ctx)
		if err != nil {
			return a, err
		}
		what, statement := "count effects", doubledSQL
		if q.Ask == AskMissing {
			what, statement = "look for events without an effect", missingSQL
		}
		f, read, timeout = func(ctx context.Context, tx pgx.Tx, q Request) ([]Held, error) {
			return r.compareEffects(ctx, tx, what, statement, schema, q)
		}, r.ReadEffects, effectsTimeout
	default:
		return Answer{}, fmt.Errorf("%w: %q is not known here", ErrRequest, q.Ask)
	}
	return a, read(ctx, func(tx pgx.Tx) (err error) {
		if err = bound(ctx, tx, timeout); err == nil {
			a.Held, err = f(ctx, tx, q)
		}
		return err
	})
}

// digest reads the table from q.Page on, in the order in which its rows lie, for [sliceTime]. Each
// statement has its own snapshot: a row that moves meanwhile may count twice or not at all,
// which makes its range differ, and its keys are compared one by one.
func (r *Receiver) digest(ctx context.Context, q Request, a *Answer) error {
	d := NewDigest(q.Salt, q.Bounds)
	until := time.Now().Add(sliceTime)
	for page := q.Page; ; page += slicePages {
		err := r.Read(ctx, func(tx pgx.Tx) (err error) {
			if err := bound(ctx, tx, statementTimeout); err != nil {
				return err
			}
			if a.Pages, err = pages(ctx, tx); err != nil || page >= a.Pages {
				return err
			}
			return r.addPages(ctx, tx, q, page, d, a)
		})
		if err != nil {
			return err
		}
		if a.Next = page + slicePages; a.Next >= a.Pages || time.Now().After(until) {
			a.Ranges = d.ranges()
			return nil
		}
	}
}
