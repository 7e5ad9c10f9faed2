package routes

import (
	"fmt"
	"testing"
)

func TestRouteDifferences(t *testing.T) {
	t.Parallel()
	before := parse("* a", "t b")
	for want, next := range map[string][]Route{
		"[]":                            {{Event: "*", To: []string{"a"}}, {Event: "t", To: []string{"b"}}},
		"[routes: 1 added, 0 removed]":  {{Event: "*", To: []string{"a"}}, {Event: "t", To: []string{"a", "b"}}},
		"[routes: 2 added, 2 removed]":  parse("*.x a", "t c"),
		"[routes: 0 added, 2 removed]":  nil,
		"[routes: 10 added, 2 removed]": {{Event: "u", To: []string{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}}},
	} {
		if got := fmt.Sprint(Differences(before, next)); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
