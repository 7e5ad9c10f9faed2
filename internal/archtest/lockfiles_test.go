package archtest

import (
	"encoding/json"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var permittedLicences = regexp.MustCompile(`(?m)^allowed=(\S+)$`)

// careless returns which npm packages of a lockfile have a licence that is not permitted, no hash,
// or the address of a registry that others may not reach.
func careless(t *testing.T, name, text string) (violations []string) {
	t.Helper()
	var lock struct {
		Packages map[string]struct {
			License   string `json:"license"`
			Integrity string `json:"integrity"`
			Resolved  string `json:"resolved"`
		} `json:"packages"`
	}
	if err := json.Unmarshal([]byte(text), &lock); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	permitted := strings.Split(permittedLicences.FindStringSubmatch(read(t, ".ci/licences.sh"))[1], ",")
	for of, p := range lock.Packages {
		report := func(format string, args ...any) {
			violations = append(violations, fmt.Sprintf("%s: %s: %s", name, of, fmt.Sprintf(format, args...)))
		}
		if of == "" {
			continue // the list itself
		}
		if !slices.Contains(permitted, p.License) {
			report("its licence %q is not among %q", p.License, permitted)
		}
		if !strings.HasPrefix(p.Integrity, "sha512-") {
			report("it has no SHA-512 hash")
		}
		if p.Resolved != "" {
			report("it is bound to one registry; write the file with --omit-lockfile-registry-resolved")
		}
	}
	return violations
}

func TestLockfiles(t *testing.T) {
	t.Parallel()
	found := 0
	for _, name := range tree(t) {
		if path.Base(name) != "package-lock.json" {
			continue
		}
		found++
		for _, violation := range careless(t, name, read(t, name)) {
			t.Error(violation)
		}
	}
	if found == 0 {
		t.Error("there is no lockfile")
	}
	for lock, want := range map[string]int{
		`{"": {}, "node_modules/a": {"license": "MIT", "integrity": "sha512-x"}}`:                                   0,
		`{"node_modules/a": {"license": "MIT"}}`:                                                                    1,
		`{"node_modules/a": {"license": "MIT", "integrity": "sha1-x"}}`:                                             1,
		`{"node_modules/a": {"license": "GPL-3.0", "integrity": "sha512-x"}}`:                                       1,
		`{"node_modules/a": {"integrity": "sha512-x"}}`:                                                             1,
		`{"node_modules/a": {"license": "MIT", "integrity": "sha512-x", "resolved": "https://registry.test/a"}}`:    1,
		`{"node_modules/a": {"license": "GPL-3.0"}, "node_modules/b": {"license": "MIT", "integrity": "sha512-x"}}`: 2,
	} {
		if got := careless(t, "package-lock.json", `{"packages": `+lock+`}`); len(got) != want {
			t.Errorf("%s: reported %q, want %d", lock, got, want)
		}
	}
}
