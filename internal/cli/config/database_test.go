package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// Whatever is wrong with a database URL, no part of its password may be printed: where a URL is
// malformed, no program can tell where the password ends.
func TestSecurityDatabaseURLMistakes(t *testing.T) {
	t.Parallel()
	const (
		example = "; write one such as postgres://user:password@localhost:5432/app"
		port    = "has a port that is not a number from 1 to 65535 (an IPv6 address needs [ ]; in a password write / as %2F and : as %3A)"
		escape  = "is not a valid URL; percent-encode what is special in user and password: % as %25, @ as %40, / as %2F"
		pairs   = "is not a list of key=value pairs; quote values with blanks: password='…'"
	)
	for url, want := range map[string]string{
		"hunter2":                                                         "is neither a URL nor key=value pairs" + example,
		"postgres://":                                                     "names no host" + example,
		"mysql://u:hunter2@h/db":                                          "begins with another scheme than postgres://" + example,
		"hunter2://u@h/db":                                                "begins with another scheme than postgres://" + example,
		"Postgres://u:hunter2@h/db":                                       "begins with another scheme than postgres://" + example,
		"postgres://u:hunter2@::1/db":                                     port,
		"postgres://u:hunter2@h:99999/db":                                 port,
		"postgres://u:hunter2@h:x/db":                                     port,
		"postgres://u:hun/ter2@h/db":                                      "has an @ after the host: write @ in user or password as %40, and / as %2F",
		"postgres://u:hunter2@ter2@h/db":                                  "has an @ after the host: write @ in user or password as %40, and / as %2F",
		"postgres://u:12/hunter2@h/db":                                    "has an @ after the host: write @ in user or password as %40, and / as %2F",
		"postgres://u:hunter2%zz@h/db":                                    escape,
		"postgres://u:hunter2%@h/db":                                      escape,
		"postgres://u:hunter2@[::1/db":                                    escape,
		"postgres://u:hunter2@h/db?sslmode":                               escape,
		"postgres://u:hunter2@h1,h2,h3/db?port=1,2":                       "has another number of ports than of hosts",
		"host=h1,h2,h3 port=1,2 password=hunter2":                         "has another number of ports than of hosts",
		"postgres://u:hunter2@h/db?sslmode=off":                           "has TLS settings that cannot be used; see sslmode, sslrootcert, sslcert and sslkey",
		"postgres://u:hunter2@h/db?sslmode=verify-ca&sslrootcert=/none":   `has TLS settings that cannot be used; see sslmode, sslrootcert, sslcert and sslkey (cannot read "/none": no such file or directory)`,
		"postgres://u:hunter2@h/db?connect_timeout=x":                     "has a connect_timeout that is not a number of seconds",
		"postgres://u:hunter2@h/db?target_session_attrs=x":                "has an unknown target_session_attrs",
		"postgres://u:hunter2@h/db?pool_max_conns=many":                   "has an invalid pool_… parameter",
		"host=h password=hunter2 x":                                       pairs,
		"host=h password='hunter2":                                        pairs,
		"postgres://u:hunter2\n@h/db":                                     "contains a control character, such as a line break",
		"postgres://u:hunter2@h/\x00":                                     "contains a control character, such as a line break",
		"postgres://u:hunter2@h/db?default_query_exec_mode=hunter2":       "cannot be parsed" + example,
		"postgres://u:hunter2@h/db?service=hunter2&servicefile=/none":     "names a service that cannot be read",
		"postgres://u:hunter2@h/db?channel_binding=x":                     "has an unknown channel_binding",
		"postgres://u:hunter2@h/db?require_auth=x":                        "has an invalid require_auth",
		"postgres://u:hunter2@h/db?sslcertmode=x":                         "has an unknown sslcertmode",
		"postgres://u:hunter2@h/db?min_protocol_version=x":                "has an invalid protocol version",
		"postgres://u:hunter2@h/db?options=x&sslmode=require&sslcert=/no": "has TLS settings that cannot be used; see sslmode, sslrootcert, sslcert and sslkey",
	} {
		t.Run(url, func(t *testing.T) {
			testsize.OneIn(t, 3)
			t.Parallel()
			r := check(t, "", append([]string{"OUTBOX_DATABASE_URL=" + url}, twoSettings[1]))
			r.expect(t, cli.ExitConfig, "", mistakes("env OUTBOX_DATABASE_URL: "+want))
		})
	}
}

func TestDatabaseURLsThatWork(t *testing.T) {
	t.Parallel()
	for url, shown := range map[string]string{
		"postgres://u:hunter2@h/db":                              "postgres://u:***@h:5432/db",
		"postgresql://u:hun%2Fter2%40@h:6000/db?sslmode=disable": "postgres://u:***@h:6000/db",
		"postgres://u:hun#ter?2@h/db":                            "postgres://u:***@h:5432/db",
		"postgres://u:hunter2@[::1]:5433/db":                     "postgres://u:***@[::1]:5433/db",
		"postgres://u:hunter2@a:1,b:2/db":                        "postgres://u:***@a:1,b:2/db",
		"postgres://u:hunter2@/db?host=/run/pg":                  "postgres://u:***@/db?host=/run/pg",
		"postgres://u@h/db?password=hunter2":                     "postgres://u:***@h:5432/db",
		"host=h user=u password='hunter2 x' dbname=db":           "postgres://u:***@h:5432/db",
		"postgres://u:hunter2@h/db?pool_max_conns=2":             "postgres://u:***@h:5432/db",
	} {
		c := loadFrom(sources{Env: append([]string{"OUTBOX_DATABASE_URL=" + url}, twoSettings[1])})
		if err := c.Err(); err != nil {
			t.Errorf("%s: %v", url, err)
		} else if got := c.DatabaseName(); got != shown {
			t.Errorf("%s is shown as %s, want %s", url, got, shown)
		}
	}
}

// FuzzFile: whatever a file holds, reading it ends, every mistake is one printable line, no mistake
// tells the password, and what is accepted can be shown.
func FuzzFile(f *testing.F) {
	text, err := os.ReadFile(sample)
	testkit.Must(f, err)
	for _, seed := range []string{
		string(text), "", "a: &a [*a]\n", "routes: &r [{event: x, to: &t [a]}, {event: y, to: *t}]\nalerts: *r\n",
		"destinations: {a.b: {url: 'http://a', headers: {x.y: z}}, '': {}, ' ': {}}\n", "? {a: b}\n: c\n", "log: !!binary aGk=\n", "<<: {log: {}}\n",
		"defaults: {retry: {schedule: ['5s,6s', '${A:-7s,8s}', '${']}}\n", "\ufeff---\n...\n---\n", "\xff\xfe\x00", "a:\n\t- b\n", "log: {level: \"\\x00\\u2028\\u202e\"}\n",
	} {
		f.Add([]byte(seed))
	}
	file := filepath.Join(f.TempDir(), usualFile)
	f.Fuzz(func(t *testing.T, content []byte) {
		testkit.Must(t, os.WriteFile(file, content, 0o600))
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
