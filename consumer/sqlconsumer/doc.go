// Package sqlconsumer is package consumer for database/sql: for a *sql.DB of any PostgreSQL driver,
// and for what is built upon one, such as sqlx and GORM.
//
//	receive, err := sqlconsumer.New(db, consumer.Config{Receiver: "logistics", Secrets: secrets}, func(ctx context.Context, tx *sql.Tx, event consumer.Event) error {
//		_, err := tx.ExecContext(ctx, "INSERT INTO shipment (invoice) VALUES ($1)", event.RelatedReference)
//		return err // nil commits; an error rolls back, and the relay retries
//	})
//	mux.Handle("POST /webhooks/finance", receive)
//
// sqlx: pass db.DB, and use &sqlx.Tx{Tx: tx, Mapper: db.Mapper} in the handler, but bind names by
// db.BindNamed: a transaction that sqlx did not begin does not know PostgreSQL's placeholders.
// GORM: set Statement.ConnPool of a Session to tx. docs/receiving.md shows both.
//
// Each name is the twin of the one in package consumer, whose documentation says what both do.
// Config, Event, Report and the errors that a handler returns are those of package consumer. Three
// things differ: a request costs two round trips more, a *sql.Tx cannot refuse Commit and Rollback
// (see [Tx]), and a receiver takes no batches, so that events come one by one. For outbox-relay
// reconcile, give consumer.Reconcile a pgxpool.Pool of the same database.
package sqlconsumer
