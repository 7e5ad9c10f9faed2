// Package storetest tests whether a [store.Store] keeps its promises. Its author runs it in the
// tests of that store:
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, storetest.Subject{New: …, NewServer: …, SurvivesRestart: true})
//	}
//
// What store.Middleware makes of these promises is tested in package store, and not again here.
//
// No test sleeps or asserts how long something took. A test that needs a lease to end asks for the
// event until it is free.
package storetest
