// Package run is the command run: the relay with all that it has beside it in its process.
//
//	run.go      the command
//	several.go  the same for several outboxes
//	reload.go   a new configuration at SIGHUP
//	monitor.go  metrics and health
//	console.go  the page and the API for operators
//	traces.go   spans of the attempts
//	log.go      what libraries write to the standard logger
package run
