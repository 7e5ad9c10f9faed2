// Package readertest tests what every reader of a distributed log promises to the receiver that it
// gives the events to. kafkaconsumer's own tests run it over an imitation of a server, and module
// internal/natstest over a real one of NATS.
//
//	readertest.go  a log, a database, and what a handler does
//	suite.go       the promises
package readertest
