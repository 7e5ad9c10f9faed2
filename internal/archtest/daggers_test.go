package archtest

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
)

var (
	wholeTest = regexp.MustCompile(`(?ms)^func (Test[A-Z]\w+)\([^\n]*\{\n(.*?)^\}`)
	takesLong = regexp.MustCompile(`(?m)^\ttestsize\.Long\(`)
	skips     = regexp.MustCompile(`\bt\.Skipf?\(`)
	buildTag  = regexp.MustCompile(`(?m)^//go:build [a-z]+$`)
	namedTest = regexp.MustCompile("`(Test[A-Z]\\w+)`(†?)( \\()?")
)

// daggers returns where a page is wrong about when its tests run: a † means that make test skips
// one, and one that others skip, too, has a condition behind it, or a target in its line.
func daggers(page string, files []*source) (violations []string) {
	long, conditional := map[string]bool{}, map[string]bool{}
	for _, f := range files {
		for _, test := range wholeTest.FindAllStringSubmatch(f.text, -1) {
			long[test[1]] = long[test[1]] || takesLong.MatchString(test[2])
			conditional[test[1]] = conditional[test[1]] || buildTag.MatchString(f.text) || skips.MatchString(test[2])
		}
	}
	for _, line := range strings.Split(page, "\n") {
		for _, named := range namedTest.FindAllStringSubmatch(line, -1) {
			switch name, dagger, condition := named[1], named[2] != "", named[3] != ""; {
			case dagger != long[name]:
				violations = append(violations, fmt.Sprintf("%s: has a †: %t, calls testsize.Long first: %t", name, dagger, long[name]))
			case conditional[name] && !condition && !strings.Contains(line, "`make "):
				violations = append(violations, name+": is skipped, and the page does not say where, or which target runs it")
			}
		}
	}
	return violations
}

func TestDaggersOfReliability(t *testing.T) {
	t.Parallel()
	for _, violation := range daggers(read(t, "docs/reliability.md"), repository(t)) {
		t.Errorf("docs/reliability.md: %s", violation)
	}
	files := []*source{
		snippet{text: "func TestLong(t *testing.T) {\n\ttestsize.Long(t)\n}\nfunc TestShort(t *testing.T) {\n\ttestsize.Of(1, 2)\n}\nfunc TestRoot(t *testing.T) {\n\tif true {\n\t\tt.Skip()\n\t}\n}\n"}.source(t),
	}
	for page, want := range map[string]int{
		"`TestLong`†, `TestShort`, `TestRoot` (as root)": 0, "`TestRoot` | `make test-root`": 0, "`TestLong`, `TestShort`†, `TestRoot`": 3,
	} {
		if found := daggers(page, files); len(found) != want {
			t.Errorf("%q: reported %q, want %d", page, found, want)
		}
	}
}
