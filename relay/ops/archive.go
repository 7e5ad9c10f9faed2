package ops

import (
	"context"

	"github.com/outbox-relay/outbox-relay/relay/archive"
)

// Archive moves settled events into the archive and prunes, as keep says; see [archive.Job.Run]. progress, which may be nil, is
// called after every batch and must return at once.
func (o *Outbox) Archive(ctx context.Context, keep archive.Retention, progress func(archive.Progress)) (archive.Result, error) {
	return archive.Job{DB: o.pool, Keep: keep, Progress: progress}.Run(ctx)
}

// ArchiveDue counts what [Outbox.Archive] would do now, and changes nothing. It goes through the same rows, at the same
// pace.
func (o *Outbox) ArchiveDue(ctx context.Context, keep archive.Retention, progress func(archive.Progress)) (archive.Result, error) {
	return archive.Job{DB: o.pool, Keep: keep, Progress: progress}.Rehearse(ctx)
}
