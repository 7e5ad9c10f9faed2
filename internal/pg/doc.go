// Package pg is how relays and operators reach their PostgreSQL: one interface for statements,
// settings for connections, with and without a pooler in between, the meaning of SQLSTATEs, the
// check of the schema, and conditions that the statements of several rooms share. It imports no
// other room.
package pg
