package consumer

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/consumer/internal/memory"
)

// Version orders the events of one entity: [BySequence] or [ByTime]. The zero value is none and refused.
type Version memory.Version

// BySequence makes a version of a number that grows with every event of the entity, such as [Event].Sequence or a revision
// in the payload. It is at least 1: 0 is what Event.Sequence says of an event without an ordering key, and would make every
// event after the first one stale.
func BySequence(n int64) Version { return Version(memory.BySequence(n)) }

// ByTime makes a version of when something happened and a number that decides between equal times, such as
// [Event].CreatedAt and [Event].ID, which grows within one outbox. Times are compared in microseconds, as PostgreSQL keeps
// them; what is shorter is dropped. t lies in the years 1 to 9999 and is not the zero time, which is what Event.CreatedAt
// says of a foreign sender's event.
//
// Times order events as well as the clocks they come from do. CreatedAt is when the producer's transaction began: of two
// that ran at the same time, the one that committed last may bear the earlier time. Where that matters, use a sequence.
func ByTime(t time.Time, tiebreak int64) Version { return Version(memory.ByTime(t, tiebreak)) }

// String is the version as errors show it.
func (v Version) String() string { return memory.Version(v).String() }

// ApplyIfNewer records v as the newest version of an entity, inside the transaction of the handler, if it is newer than all
// earlier ones. Call it before writing, and write only if applied is true. Otherwise a version as new or newer is there
// already: leave the entity as it is, the event is processed all the same.
//
//	applied, err := consumer.ApplyIfNewer(ctx, tx, "customer", customer.ID, consumer.BySequence(event.Sequence))
//	if err != nil || !applied {
//		return err // nil for a stale event
//	}
//
// So the entity ends as its newest event says, in whatever order events arrive and however many are worked at once. It is
// for events that carry the whole state; those that change it by a difference need order instead. A version that equals
// the newest is stale. What is recorded rolls back with tx, and outlives the entity: a deletion is one more version, after
// which late updates are stale.
//
// Scope says what kind of thing entity is, and whose numbering v is of: entities of two senders need two scopes. Both are
// 1 to 255 bytes of UTF-8 without control characters, compared byte by byte: bring texts that people type into one form
// first. All versions of an entity are of one kind; the other one is an error.
//
// While another transaction holds the entity, ApplyIfNewer waits until that one ends, bounded by ctx and lock_timeout. A
// handler that asks about several entities asks in one order, such as sorted, because two that ask crosswise deadlock, and
// PostgreSQL fails one of them (40P01). Above READ COMMITTED it fails (40001) when the version was changed since tx began.
// Return both errors as they are: the event is then tried again. After any error of the database tx is of no more use.
func ApplyIfNewer(ctx context.Context, tx pgx.Tx, scope, entity string, v Version) (applied bool, err error) {
	return memory.ApplyIfNewer(ctx, scope, entity, memory.Version(v), execIn(tx))
}
