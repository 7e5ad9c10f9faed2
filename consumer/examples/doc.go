// Package examples holds receivers to copy from, each a program of one file that its test runs as a
// process against a real PostgreSQL, with requests or messages signed as a relay signs them:
//
//	nethttp   net/http and pgx, nothing else
//	routers   behind the router chi and the frameworks echo and gin
//	sqlx      database/sql, with sqlx
//	gorm      database/sql, with GORM
//	worker    an inbox: recorded at once, worked later; continues the event's trace
//	nats      a reader of a stream of NATS JetStream
//	kafka     a reader of a topic of Kafka
//	svix      a foreign sender: Standard Webhooks under other names
//	stripe    a foreign sender that signs in its own way
//
// They read DATABASE_URL, LISTEN (readers: NATS_URL, KAFKA_BROKERS) and the sender's secret from
// the environment, and expect the receiver's migrations and their own tables:
//
//	CREATE TABLE shipments (invoice text PRIMARY KEY, total numeric NOT NULL CHECK (total > 0));
//	CREATE TABLE addresses (customer text PRIMARY KEY, address text NOT NULL)
//
// The examples are their own module, so that importing package consumer does not bring what they
// need.
package examples
