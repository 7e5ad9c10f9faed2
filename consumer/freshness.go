package consumer

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
)

// Version orders the events of one entity. Make one with [BySequence] or [ByTime]. The zero value
// is refused.
type Version memory.Version

// BySequence returns a version made of a number that grows with every event of the entity, such as
// [Event].Sequence or a revision in the payload. It is at least 1. Event.Sequence is 0 for an event
// without an ordering key, which would make every event after the first one stale.
func BySequence(n int64) Version { return Version(memory.BySequence(n)) }

// ByTime returns a version made of a time and a number that decides between equal times, such as
// [Event].CreatedAt and [Event].ID, which grows within one outbox. Times are truncated to
// microseconds, as in PostgreSQL. t lies in the years 1 to 9999. The zero time is refused: it is
// the CreatedAt of a foreign sender's event.
//
// Times order events only as well as the clocks behind them. CreatedAt is the time at which the
// producer's transaction began. Of two transactions that ran at once, the one that committed last
// may have the earlier time. Use a sequence where that matters.
func ByTime(t time.Time, tiebreak int64) Version { return Version(memory.ByTime(t, tiebreak)) }

// String returns the version as it appears in errors.
func (v Version) String() string { return memory.Version(v).String() }

// ApplyIfNewer records v as the newest version of an entity, in the handler's transaction, if it is
// newer than all earlier ones. Call it before writing, and write only if applied is true. When it
// is false, a version at least as new is recorded: leave the entity as it is. The event counts as
// processed all the same.
//
//	version := consumer.BySequence(event.Sequence)
//	applied, err := consumer.ApplyIfNewer(ctx, tx, "customer", customer.ID, version)
//	if err != nil || !applied {
//		return err // nil for a stale event
//	}
//
// The entity then ends in the state of its newest event, in whatever order events arrive and
// however many are processed at once. ApplyIfNewer is for events that carry the whole state. Events
// that change the state by a difference need an ordering key instead. A version equal to the newest
// one is stale. The record is rolled back with tx, and outlives the entity: a deletion is one more
// version, after which late updates are stale.
//
// Scope names the kind of entity and the source of its numbers: entities of two senders need two
// scopes. Scope and entity are 1 to 255 bytes of UTF-8 without control characters, compared byte by
// byte. Normalise text that people type. All versions of one entity have the same kind; mixing
// kinds is an error.
//
// ApplyIfNewer waits while another transaction holds the entity, bounded by ctx and lock_timeout. A
// handler that calls it for several entities must use one order, such as sorted: otherwise two
// handlers can deadlock, and PostgreSQL fails one of them (40P01). Above READ COMMITTED it fails
// with 40001 when the version changed since tx began. Return both errors unchanged, and the event
// is retried. After any error of the database tx cannot be used any more.
func ApplyIfNewer(ctx context.Context, tx pgx.Tx, scope, entity string, v Version) (applied bool, err error) {
	return memory.ApplyIfNewer(ctx, scope, entity, memory.Version(v), execIn(tx))
}
