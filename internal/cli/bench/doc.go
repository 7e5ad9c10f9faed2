// Package bench is the command bench: it measures what a relay does with a database, in its own
// schema.
//
//	bench.go    the command, the schema, the report
//	measure.go  the drain and the steady rate, with a relay in this process
//	load.go     producers and receiver, in their own process
//	limit.go    what limited a drain
package bench
