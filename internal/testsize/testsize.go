// Package testsize keeps make test short. With -short, as make test has it, the longest tests are
// skipped and others take smaller amounts. Without it, as in make test-all, everything runs in
// full.
package testsize

import (
	"hash/fnv"
	"slices"
	"strings"
	"testing"
)

// Long skips t in make test. Quick tests of a core promise (nothing lost, nothing twice, order,
// rescue) must not call it.
func Long(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("takes long: make test-all runs it")
	}
}

// OneIn skips t, a row of a matrix, in make test, but for about one row in n and those that end in
// one of the names always. The name of the row chooses, so that every run has the same rows. A row
// that alone tests a core promise must be in always, as go test prints it.
func OneIn(t testing.TB, n uint32, always ...string) {
	t.Helper()
	hash := fnv.New32a()
	hash.Write([]byte(t.Name()))
	if hash.Sum32()%n == 0 || slices.ContainsFunc(always, func(name string) bool { return strings.HasSuffix(t.Name(), "/"+name) }) {
		return
	}
	Long(t)
}

// Of returns full in make test-all and small in make test.
func Of[T any](full, small T) T {
	if testing.Short() {
		return small
	}
	return full
}
