package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/google/licensecheck"
)

// permissive are the licences, by their SPDX names, that ask for no more than a notice.
var permissive = []string{"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT"}

// exceptions are modules under another licence, and why they may stay.
var exceptions = map[string]struct{ licence, why string }{
	"pgregory.net/rapid":                                 {"MPL-2.0", "tests alone use it, so no binary and no importer has it"},
	"github.com/opencontainers/go-digest":                {"CC-BY-SA-4.0", "its documents alone are under it, and make release alone uses its code, under Apache-2.0"},
	"github.com/riverqueue/river":                        {"MPL-2.0", "make bench alone measures beside it, so no binary that ships and no importer has it"},
	"github.com/riverqueue/river/riverdriver":            {"MPL-2.0", "make bench alone measures beside it, so no binary that ships and no importer has it"},
	"github.com/riverqueue/river/riverdriver/riverpgxv5": {"MPL-2.0", "make bench alone measures beside it, so no binary that ships and no importer has it"},
	"github.com/riverqueue/river/rivershared":            {"MPL-2.0", "make bench alone measures beside it, so no binary that ships and no importer has it"},
	"github.com/riverqueue/river/rivertype":              {"MPL-2.0", "make bench alone measures beside it, so no binary that ships and no importer has it"},
}

// A module is a dependency and where its files are.
type module struct{ path, version, dir string }

func (m module) String() string { return m.path + "@" + m.version }

// ownPath begins the modules of this repository, whose licence is at its top.
const ownPath = "github.com/outbox-relay/outbox-relay"

// modulesOf returns the modules that the packages of a directory's module and their tests are built with.
func modulesOf(directory string) (modules []module, err error) {
	cmd := exec.Command("go", "list", "-deps", "-test", "-f",
		"{{with .Module}}{{if not .Main}}{{.Path}}\t{{.Version}}\t{{.Dir}}{{end}}{{end}}", "./...")
	cmd.Dir, cmd.Stderr = directory, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list the modules of %s: %w", directory, err)
	}
	for line := range strings.Lines(string(out)) {
		fields := strings.Split(strings.TrimSpace(line), "\t")
		if len(fields) != 3 || fields[1] == "" || strings.HasPrefix(fields[0], ownPath) {
			continue // a package of the standard library, or a module of this repository
		}
		if m := (module{fields[0], fields[1], fields[2]}); !slices.Contains(modules, m) {
			modules = append(modules, m)
		}
	}
	return modules, nil
}

// licencesIn returns the licences that the files at the top of a module hold. Text that is no licence known may be a quarter
// of such a file at most: names, years, a preamble.
func licencesIn(dir string) (found []string, err error) {
	files := os.DirFS(dir)
	entries, err := fs.ReadDir(files, ".")
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		name := strings.ToUpper(entry.Name())
		if entry.IsDir() || strings.HasSuffix(name, ".GO") || !strings.HasPrefix(name, "LICENSE") && !strings.HasPrefix(name, "LICENCE") && !strings.HasPrefix(name, "COPYING") {
			continue
		}
		text, err := fs.ReadFile(files, entry.Name())
		if err != nil {
			return nil, err
		}
		coverage := licensecheck.Scan(text)
		if coverage.Percent < 75 {
			return nil, fmt.Errorf("%s is no licence known by more than %.0f %%", entry.Name(), coverage.Percent)
		}
		for _, match := range coverage.Match {
			found = append(found, match.ID)
		}
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

// permitted returns why a module may not be used; nil: it may.
func permitted(path string, licences []string) error {
	if len(licences) == 0 {
		return errors.New("it has no licence")
	}
	exception, excepted := exceptions[path]
	for _, licence := range licences {
		if !slices.Contains(permissive, licence) && (!excepted || exception.licence != licence) {
			return fmt.Errorf("%s is not among %s", licence, strings.Join(permissive, ", "))
		}
	}
	return nil
}

// checkLockfiles returns which npm packages of a directory's lockfiles have another licence, no hash to compare them with, or the
// address of a registry that others may not reach.
func checkLockfiles(directory string) (problems []error, err error) {
	files := os.DirFS(directory)
	lockfiles, err := fs.Glob(files, ".ci/npm/*/package-lock.json")
	if err != nil {
		return nil, err
	}
	receivers, err := fs.Glob(files, "consumer/elsewhere/*/package-lock.json")
	if err != nil {
		return nil, err
	}
	lockfiles = append(lockfiles, receivers...)
	for _, name := range lockfiles {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, err
		}
		var lock struct {
			Packages map[string]struct {
				License   string `json:"license"`
				Integrity string `json:"integrity"`
				Resolved  string `json:"resolved"`
			} `json:"packages"`
		}
		if err := json.Unmarshal(text, &lock); err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
		for path, p := range lock.Packages {
			if path == "" {
				continue // the list itself
			}
			if err := permitted(path, []string{p.License}); err != nil {
				problems = append(problems, fmt.Errorf("%s: %s: %w", name, path, err))
			}
			if !strings.HasPrefix(p.Integrity, "sha512-") {
				problems = append(problems, fmt.Errorf("%s: %s has no SHA-512 hash", name, path))
			}
			if p.Resolved != "" {
				problems = append(problems, fmt.Errorf("%s: %s is bound to one registry; write the file with --omit-lockfile-registry-resolved", name, path))
			}
		}
	}
	return problems, nil
}
