// Package storetest tells whether a memory of events keeps the promises of package consumer. The author of a
// [store.Store] runs it in the tests of that store:
//
//	func TestStore(t *testing.T) {
//		storetest.RunStore(t, func(t testing.TB) store.Store { … })
//		storetest.Run(t, storetest.Subject{New: …, NewServer: …})
//	}
//
// [RunStore] asks the store itself. [Run] asks a receiver that uses it, over HTTP, with signed requests to real servers;
// consumer.Middleware and sqlconsumer.Middleware pass it as well. What a memory does not promise it says in [Promises]: the
// tests then demand the weaker behaviour that its documentation describes, and leave nothing out.
//
// No test sleeps or asserts how long something took. What only time can bring about, the end of a lease, they ask for until
// it is there.
package storetest
