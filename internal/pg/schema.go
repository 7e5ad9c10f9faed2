package pg

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/outbox-relay/outbox-relay/migrations"
)

// ErrSchema says that the database's schema is not the one this build works with.
var ErrSchema = errors.New("schema mismatch")

// CheckSchema also returns the version of a schema that is newer than this build; 0: it is not.
func CheckSchema(ctx context.Context, q DB) (newer int64, err error) {
	version, err := schemaVersion(ctx, q)
	want := migrations.Outbox.Latest()
	switch {
	case HasCode(err, UndefinedTable) && lacksSchema(ctx, q):
		return 0, fmt.Errorf("%w: there is no outbox schema here (version %d is needed); run: outbox-relay migrate up", ErrSchema, want)
	case err != nil:
		return 0, fmt.Errorf("read schema version: %w", err)
	case version < want:
		return 0, fmt.Errorf("%w: the database has version %d, this build needs %d; run: outbox-relay migrate up", ErrSchema, version, want)
	case version == want:
		return 0, nil
	}
	since, err := compatibleSince(ctx, q)
	switch {
	case err != nil:
		return 0, fmt.Errorf("read schema version: %w", err)
	case since > want:
		return 0, fmt.Errorf("%w: the database has version %d, which works with builds that know %d or later, this build knows %d; run a newer outbox-relay",
			ErrSchema, version, since, want)
	}
	return version, nil
}

// CheckHistory checks that the schema has come to its version by the migrations of this build: the
// numbers of another history, such as of builds before the first release, do not mean the same. An
// error that wraps [ErrSchema] says what is missing.
func CheckHistory(ctx context.Context, q DB) error {
	versions, columns, err := findMissing(ctx, q, migrations.Outbox.Versions())
	if err != nil || len(versions)+len(columns) == 0 {
		return err
	}
	missing := strings.Join(columns, ", ")
	if len(versions) > 0 {
		missing = "migration " + strings.Join(versions, ", ")
	}
	return fmt.Errorf("%w: the schema lacks %s, and so is of another history than this build; run the outbox-relay that made it, or give this one its own schema "+
		"(outbox-relay migrate up --schema NAME, database.schema)", ErrSchema, missing)
}

// ErrSuperuser says that a relay would work with all rights of the server, beside logins that have
// few.
var ErrSuperuser = errors.New("the login of the relay is a superuser, and other logins may connect to this database")

// SchemaCreators are the roles that may create objects in the schema of the outbox, beside its
// owners and superusers. A function or an operator that one of them creates there can take the
// place of what statements of relays, producers and operators mean, and then runs with their
// rights.
type SchemaCreators struct {
	// Schema as SQL writes it.
	Schema string `json:"schema"`
	// Roles as SQL writes them, PUBLIC among them; empty: there are none, as it should be.
	Roles []string `json:"roles"`
	// Owner of the tables, as SQL writes it. It needs the right itself, for the partitions of the
	// archive.
	Owner string `json:"owner"`
}

// Revoke returns the statements that take the right from the roles and leave it to the owner of the
// tables, for a superuser or the owner of the schema to run. It returns an empty text if there are
// no such roles.
func (c SchemaCreators) Revoke() string {
	if len(c.Roles) == 0 {
		return ""
	}
	return fmt.Sprintf("REVOKE CREATE ON SCHEMA %s FROM %s; GRANT CREATE ON SCHEMA %[1]s TO %[3]s", c.Schema, strings.Join(c.Roles, ", "), c.Owner)
}
