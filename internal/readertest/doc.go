// Package readertest tests what every reader of a distributed log promises to the receiver that it
// gives the events to. The readers' own tests run it, natsconsumer's over a server and
// kafkaconsumer's over an imitation of one.
//
//	readertest.go  a log, a database, and what a handler does
//	suite.go       the promises
package readertest
