// Package config is the configuration of outbox-relay: the table of its settings, what they are
// read into, and the database that they name. The commands config init, check and show stand here
// as well.
//
//	table.go     one row a setting: path, variable, flag, parser, field, default
//	values.go    parsers of single values, and which part of a secret URL is shown
//	config.go    reading: sources, table, fields
//	check.go     mistakes beyond the single value
//	wire.go      how a destination's requests travel: TLS and credentials
//	admin.go     section admin
//	traces.go    section traces
//	flags.go     flags that several commands share
//	database.go  connections, the check of the schema, and what a command asks
//	log.go       the log, and the line that says who changed something
//	commands.go  config init, check, show
package config
