package archtest

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

// foreign are texts that hold for one machine only. Each pattern is spelled so that it does not match itself.
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

var (
	markdownLink = regexp.MustCompile(`\]\(([^)#\s]+)(#[^)]*)?\)`)
	makeCall     = regexp.MustCompile("(?m)(?:^|`|&& )make ([a-z][a-z-]*)")
	makeTarget   = regexp.MustCompile(`(?m)^([a-z][a-z-]*):`)
)

// brokenReferences returns the files and make targets that a document names and that do not exist.
func brokenReferences(name, text, makefile string) (violations []string) {
	for _, link := range markdownLink.FindAllStringSubmatch(text, -1) {
		if strings.Contains(link[1], "://") || strings.HasPrefix(link[1], "mailto:") {
			continue
		}
		if _, err := os.Stat(filepath.Join(root, path.Dir(name), link[1])); err != nil {
			violations = append(violations, fmt.Sprintf("%s: links to %s, which does not exist", name, link[1]))
		}
	}
	targets := map[string]bool{}
	for _, target := range makeTarget.FindAllStringSubmatch(makefile, -1) {
		targets[target[1]] = true
	}
	for _, call := range makeCall.FindAllStringSubmatch(text, -1) {
		if !targets[call[1]] {
			violations = append(violations, fmt.Sprintf("%s: says make %s, which the Makefile does not have", name, call[1]))
		}
	}
	return violations
}

func TestDocumentsReferToWhatExists(t *testing.T) {
	t.Parallel()
	makefile := read(t, "Makefile")
	for _, name := range tree(t) {
		if path.Ext(name) != ".md" {
			continue
		}
		for _, violation := range brokenReferences(name, read(t, name), makefile) {
			t.Error(violation)
		}
	}
	for _, text := range []string{"[the runbook](docs/runbook.md)", "run `make coffee`", "```sh\nmake coffee # soon\n```"} {
		if found := brokenReferences("README.md", text, makefile); len(found) != 1 {
			t.Errorf("%q: reported %q, want once", text, found)
		}
	}
	if found := brokenReferences("docs/x.md", "[license](../LICENSE#mit), [site](https://example.com/x), `make test`", "test:\n"); len(found) != 0 {
		t.Errorf("wrongly reported: %q", found)
	}
}
