package check

import (
	"slices"
	"testing"
)

func TestProblems(t *testing.T) {
	t.Parallel()
	var all, part Problems
	all.Require(true, "relay.lease", "is fine")
	all.Require(false, "relay.lease", "%ds is too short", 3)
	all.Refuse("relay.name", "")
	all.Refuse("relay.name", "is 100% wrong")
	part.Require(false, "destinations.a.url", "is not set")
	all.Add(part)
	var got []string
	for _, p := range all {
		got = append(got, p.Error())
	}
	if want := []string{"relay.lease: 3s is too short", "relay.name: is 100% wrong", "destinations.a.url: is not set"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if err := Join(all[:2]); err == nil || err.Error() != "relay.lease: 3s is too short\nrelay.name: is 100% wrong" {
		t.Errorf("joined: %v", err)
	}
	if err := Join(nil); err != nil {
		t.Errorf("without mistakes: %v", err)
	}
}

func TestDifferences(t *testing.T) {
	t.Parallel()
	var names Differences
	names.Compare("lease", true)
	names.Compare("name", false)
	if !slices.Equal(names, []string{"name"}) {
		t.Errorf("%q", names)
	}
}
