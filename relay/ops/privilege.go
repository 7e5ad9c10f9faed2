package ops

import (
	"context"

	"github.com/outbox-relay/outbox-relay/relay/pg"
)

// SchemaCreators finds the roles that may create objects in the schema of the outbox. PostgreSQL up to version 14 gives that right
// on the schema public to PUBLIC.
func (o *Outbox) SchemaCreators(ctx context.Context) (pg.SchemaCreators, error) {
	return pg.FindSchemaCreators(ctx, o.pool)
}
