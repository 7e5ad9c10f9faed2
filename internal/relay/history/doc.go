// Package history keeps what relays did in the database: attempts, their outcomes and times, and
// the backlog, for each minute of a day and each hour of two weeks, by destination and event type,
// added up over all relays.
package history
