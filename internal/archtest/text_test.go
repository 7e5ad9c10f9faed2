package archtest

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// foreign are texts that hold for one machine only. Each pattern is spelled so that it does not
// match itself.
var foreign = map[string]*regexp.Regexp{
	"a home directory":            regexp.MustCompile(`/(roo[t]|home/[a-km-z][a-z0-9_-]*|Users/[A-Za-z][a-z]*)/`), // Homebrew on Linux lives in linuxbrew's
	"a directory of this machine": regexp.MustCompile(`/(wor[k]|workspac[e]|mn[t]|build[s])/`),
	"a module proxy":              regexp.MustCompile(`GOPROX[Y]|GONOSUMD[B]|GOFLAG[S]=-mod=mod|proxy\.golan[g]`),
	"a registry mirror":           regexp.MustCompile(`(?i)artifactor[y]|nexus\.[a-z]|registry\.[a-z0-9.-]+:[0-9]+/`),
	"an end of line with CR":      regexp.MustCompile(`\r\n`),
}

func foreignText(name, text string) (violations []string) {
	if !utf8.ValidString(text) || strings.Contains(name, "testdata/") {
		return nil
	}
	for what, pattern := range foreign {
		for _, found := range pattern.FindAllStringIndex(text, -1) {
			line := 1 + strings.Count(text[:found[0]], "\n")
			violations = append(violations, fmt.Sprintf("%s:%d: holds %s: %q", name, line, what, text[found[0]:found[1]]))
		}
	}
	return violations
}

func TestNothingNamesOneMachine(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	for _, name := range tree(t) {
		for _, violation := range foreignText(name, read(t, name)) {
			t.Error(violation)
		}
	}
	for _, text := range []string{
		"cd /home" + "/alice/outbox", "/roo" + "t/go/bin", "GOPROX" + "Y=https://goproxy.example", "docker pull registry.example.com" + ":5000/relay", "x\r" + "\n",
	} {
		if found := foreignText("Makefile", text); len(found) != 1 {
			t.Errorf("%q: reported %q, want once", text, found)
		}
	}
}
