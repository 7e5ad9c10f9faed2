package settings

import "testing"

func TestReferencesKeepDollarSigns(t *testing.T) {
	t.Parallel()
	env := environment{"A": {value: "1"}, "B": {value: "${A}"}}
	for text, want := range map[string]string{
		"$":            "$",
		"$A":           "$A",
		"$$":           "$",
		"$${A}":        "${A}",
		"$$$${A}":      "$${A}",
		"$$${A}":       "$1",
		"${A}${A}":     "11",
		"${B}":         "${A}", // a value is not expanded again
		"${C:-}":       "",
		"${C:-a:-b}":   "a:-b",
		"${C:-${A}":    "${A", // references do not nest
		"x${A:-2}y $5": "x1y $5",
	} {
		if got, problem := new(Set).expand(env, text); got != want || problem != "" {
			t.Errorf("%s became %q (%s), want %q", text, got, problem, want)
		}
	}
}
