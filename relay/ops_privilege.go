package relay

import (
	"context"
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
}

// Revoke returns the statement that takes the right from them; empty if there is none to take.
func (c SchemaCreators) Revoke() string {
	if len(c.Roles) == 0 {
		return ""
	}
	return "REVOKE CREATE ON SCHEMA " + c.Schema + " FROM " + strings.Join(c.Roles, ", ")
}

// SchemaCreators finds the roles that may create objects in the schema of the outbox. PostgreSQL up to version 14 gives that right
// on the schema public to PUBLIC.
func (o *Ops) SchemaCreators(ctx context.Context) (SchemaCreators, error) {
	return schemaCreators(ctx, o.pool)
}
