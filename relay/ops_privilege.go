package relay

import (
	"context"
	"fmt"
	"strings"
)

// SchemaCreators are the roles that may create objects in the schema of the outbox, beside its owners and superusers. A function
// or an operator that one of them creates there can take the place of what statements of relays, producers and operators mean,
// and then runs with their rights.
type SchemaCreators struct {
	// Schema as SQL writes it.
	Schema string `json:"schema"`
	// Roles as SQL writes them, PUBLIC among them; empty: there are none, as it should be.
	Roles []string `json:"roles"`
	// Owner of the tables, as SQL writes it. It needs the right itself, for the partitions of the archive.
	Owner string `json:"owner"`
}

// Revoke returns the statements that take the right from the roles and leave it to the owner of the tables, for a superuser or
// the owner of the schema to run. It returns an empty text if there are no such roles.
func (c SchemaCreators) Revoke() string {
	if len(c.Roles) == 0 {
		return ""
	}
	return fmt.Sprintf("REVOKE CREATE ON SCHEMA %s FROM %s; GRANT CREATE ON SCHEMA %[1]s TO %[3]s", c.Schema, strings.Join(c.Roles, ", "), c.Owner)
}

// SchemaCreators finds the roles that may create objects in the schema of the outbox. PostgreSQL up to version 14 gives that right
// on the schema public to PUBLIC.
func (o *Ops) SchemaCreators(ctx context.Context) (SchemaCreators, error) {
	return schemaCreators(ctx, o.pool)
}
