package relaytest

import (
	"reflect"
	"slices"
	"testing"
)

// CheckFields fails the test for a field of a struct that a comparison of configurations may not
// know: a setting that is forgotten there would need a restart in silence.
func CheckFields(t testing.TB, of any, known ...string) {
	t.Helper()
	typ := reflect.TypeOf(of)
	for field := range typ.Fields() {
		if name := field.Name; !slices.Contains(known, name) {
			t.Errorf("%s.%s: let a reload compare it, then name it here", typ.Name(), name)
		}
	}
}
