package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const mit = `MIT License

Copyright (c) 2026 The Authors

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation files (the
"Software"), to deal in the Software without restriction, including without limitation the rights to use, copy, modify, merge, publish,
distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is furnished to do so, subject to
the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF
MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR
ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH
THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
`

const gpl = `This program is free software: you can redistribute it and/or modify it under the terms of the GNU General Public License as
published by the Free Software Foundation, either version 3 of the License, or (at your option) any later version.
`

func TestLicences(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		files map[string]string
		path  string
		want  string // of the error; empty: permitted
	}{
		"MIT":                {map[string]string{"LICENSE": mit, "license.go": "package license"}, "m", ""},
		"another spelling":   {map[string]string{"Licence.md": mit}, "m", ""},
		"none":               {map[string]string{"README": mit}, "m", "it has no licence"},
		"its own words":      {map[string]string{"LICENSE": strings.Repeat("Ask me first. ", 100)}, "m", "is no licence known"},
		"one word of many":   {map[string]string{"LICENSE": mit + strings.Repeat("Except on Sundays, when you pay. ", 100)}, "m", "is no licence known"},
		"GPL":                {map[string]string{"COPYING": gpl}, "m", "is not among"},
		"one of them is GPL": {map[string]string{"LICENSE": mit, "COPYING": gpl}, "m", "is not among"},
	} {
		dir := t.TempDir()
		for file, text := range c.files {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		found, err := licencesIn(dir)
		if err == nil {
			err = permitted(c.path, found)
		}
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v; want %q", name, found, err, c.want)
		}
	}
	if permitted("pgregory.net/rapid", []string{"MPL-2.0"}) != nil || permitted("m", []string{"MPL-2.0"}) == nil {
		t.Error("an exception is of one module")
	}
}

func TestLockfiles(t *testing.T) {
	t.Parallel()
	for lock, want := range map[string]int{
		`{"packages": {"": {}, "node_modules/a": {"license": "MIT", "integrity": "sha512-x"}}}`:                                0,
		`{"packages": {"node_modules/a": {"license": "MIT"}}}`:                                                                 1,
		`{"packages": {"node_modules/a": {"license": "MIT", "integrity": "sha1-x"}}}`:                                          1,
		`{"packages": {"node_modules/a": {"license": "GPL-3.0", "integrity": "sha512-x"}}}`:                                    1,
		`{"packages": {"node_modules/a": {"integrity": "sha512-x"}}}`:                                                          1,
		`{"packages": {"node_modules/a": {"license": "MIT", "integrity": "sha512-x", "resolved": "https://registry.test/a"}}}`: 1,
	} {
		dir := t.TempDir()
		if err := os.MkdirAll(filepath.Join(dir, ".ci/npm/tool"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, ".ci/npm/tool/package-lock.json"), []byte(lock), 0o600); err != nil {
			t.Fatal(err)
		}
		problems, err := checkLockfiles(dir)
		if err != nil || len(problems) != want {
			t.Errorf("%s: %v, %v; want %d problems", lock, problems, err, want)
		}
	}
}
