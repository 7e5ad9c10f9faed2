// Package cli is what every command of outbox-relay works with: the program that reads the command
// line, the invocation that a command gets, questions to the operator, and exit codes.
//
// The commands stand in rooms, the packages below this one. commands.go of cmd/outbox-relay says
// which command is in which room. A room imports what all rooms share, and never another room. What
// they share, from the top down:
//
//	bulk    many rows changed at an operator's word: flags, question, batches, audit line
//	config  the configuration and the database that it names; also the commands of this name
//	cli     this package
//	output  text, tables and JSON for people and scripts
package cli
