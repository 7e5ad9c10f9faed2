// Package memory distinguishes the first request of an event from its duplicates. It has the
// statements on processed_events and the transaction that a handler works in; what must not be
// known here is HTTP, and whom a receiver trusts.
//
// [Memory] is what the receiver of package consumer needs. A Database behind [InDatabase] is one,
// the packages inbox and store have others.
package memory
