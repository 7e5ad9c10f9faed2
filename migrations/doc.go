// Package migrations holds the database schemas, as plain goose SQL files and embedded.
//
// Two sets exist: [Outbox] for databases of producers and [Inbox] for databases of receivers.
// outbox-relay migrate applies them; so does the stock goose CLI in anyone's CI:
//
//	goose -dir migrations/outbox -table outbox_schema_version postgres "$OUTBOX_DATABASE_URL" up
//	goose -dir migrations/inbox  -table inbox_schema_version  postgres "$OUTBOX_DATABASE_URL" up
//
// Table names are unqualified, so the first schema on the connection's search_path receives them.
//
// roles.sql, beside this file, is a template of least-privilege roles.
//
// Within v1 [Up], [Roles], [Set], [Outbox], [Inbox], [LockedError] and [ErrForeignVersionTable]
// stay as they are. All else is for the commands of outbox-relay, and may change in each minor
// version.
package migrations
