// Package testsize keeps make test short. With -short, as make test has it, the longest tests are skipped and others take
// smaller amounts. Without it, as in make test-all, everything runs in full.
package testsize

import "testing"

// Long skips t in make test. Quick tests of a core promise (nothing lost, nothing twice, order, rescue) must not call it.
func Long(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("takes long: make test-all runs it")
	}
}

// Of returns full in make test-all and small in make test.
func Of[T any](full, small T) T {
	if testing.Short() {
		return small
	}
	return full
}
