// Package relaytest gives tests of the relay and of its rooms a fresh outbox each.
package relaytest
