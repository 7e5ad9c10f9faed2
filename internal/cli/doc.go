// Package cli is what every command of outbox-relay works with: the program that reads the command line, the invocation that
// a command gets, questions to the operator, and exit codes. cmd/outbox-relay lists the commands.
//
// The commands stand in rooms, the packages below this one, each named after its command or after what its commands work on.
// A room imports what all rooms share, from the top down, and never another room:
//
//	bulk    many rows changed at an operator's word: flags, question, batches, audit line
//	config  the configuration and the database that it names; also the commands of this name
//	cli     this package
//	output  text, tables and JSON for people and scripts
package cli
