package relay

import (
	"context"
)

// SchemaCreators finds the roles that may create objects in the schema of the outbox. PostgreSQL up to version 14 gives that right
// on the schema public to PUBLIC.
func (o *Ops) SchemaCreators(ctx context.Context) (SchemaCreators, error) {
	return schemaCreators(ctx, o.pool)
}
