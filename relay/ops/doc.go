// Package ops is everything that an operator asks of an outbox or does to it. The commands of outbox-relay call only this; it
// needs no running relay, only a database.
package ops
