package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/outbox-relay/outbox-relay/internal/cli/output"
)

// FuzzFile: whatever a file holds, reading it ends, every mistake is one printable line, no mistake tells the password,
// and what is accepted can be shown.
func FuzzFile(f *testing.F) {
	text, err := os.ReadFile(sample)
	must(f, err)
	for _, seed := range []string{
		string(text), "", "a: &a [*a]\n", "routes: &r [{event: x, to: &t [a]}, {event: y, to: *t}]\nalerts: *r\n",
		"destinations: {a.b: {url: 'http://a', headers: {x.y: z}}, '': {}, ' ': {}}\n", "? {a: b}\n: c\n", "log: !!binary aGk=\n", "<<: {log: {}}\n",
		"defaults: {retry: {schedule: ['5s,6s', '${A:-7s,8s}', '${']}}\n", "\ufeff---\n...\n---\n", "\xff\xfe\x00", "a:\n\t- b\n", "log: {level: \"\\x00\\u2028\\u202e\"}\n",
	} {
		f.Add([]byte(seed))
	}
	file := filepath.Join(f.TempDir(), usualFile)
	f.Fuzz(func(t *testing.T, content []byte) {
		must(t, os.WriteFile(file, content, 0o600))
		c := loadFrom(sources{
			Env:      []string{"OUTBOX_DATABASE_URL=postgres://u:hunter2@localhost/db", "OUTBOX_DESTINATION_URL=http://a", "A=b"},
			Flags:    map[string]string{"config": file},
			Hostname: "host",
		})
		for _, p := range append(c.Problems, c.Warnings...) {
			line := p.String()
			if line == "" || line != output.Printable(line) || !utf8.ValidString(line) || strings.Contains(line, "hunter2") {
				t.Errorf("%q", line)
			}
		}
		if c.Err() != nil {
			return
		}
		shown, err := c.Show()
		if err != nil || strings.Contains(string(shown), "hunter2") {
			t.Errorf("%v:\n%s", err, shown)
		}
		if err := yaml.Unmarshal(shown, &yaml.Node{}); err != nil {
			t.Errorf("config show prints no YAML: %v\n%s", err, shown)
		}
	})
}

// FuzzDatabaseURL: whatever is wrong with a URL, its password is not told.
func FuzzDatabaseURL(f *testing.F) {
	for _, seed := range []string{"postgres://u:@h/db", "host=h password=", "postgres://u:@[::1]:5/db?sslmode=x", "postgres://:@", `host=\`, "postgres://u:%", "@h?=", "password='"} {
		f.Add(seed, "")
		f.Add(seed, seed)
	}
	const password = "hunter2"
	f.Fuzz(func(t *testing.T, before, after string) {
		if strings.Contains(password, before) || strings.Contains(password, after) {
			return
		}
		if _, problem := ParseDatabaseURL(before + password + after); strings.Contains(problem, password) {
			t.Errorf("%q tells the password: %s", before+password+after, problem)
		}
	})
}
