package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// usualFile is the name of a configuration file.
const usualFile = "outbox-relay.yaml"

const (
	goodSecret  = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
	otherSecret = "whsec_OTg3NjU0MzIxMDk4NzY1NDMyMTA5ODc2NTQzMjEwOTg="
)

// The environment that needs nothing else.
var twoSettings = []string{"OUTBOX_DATABASE_URL=postgres://u:p@localhost/db", "OUTBOX_DESTINATION_URL=https://logistics.internal/in"}

// check runs config check on a file of that text, and returns its stderr without the file's directory.
func check(t *testing.T, file string, env []string, flags ...string) result {
	t.Helper()
	dir := t.TempDir()
	args := append([]string{"config", "check"}, flags...)
	if file != "" {
		args = append(args, "--config", writeFile(t, filepath.Join(dir, usualFile), file))
	}
	r := command(env, args...)
	r.stderr = strings.ReplaceAll(r.stderr, dir+"/", "")
	r.stdout = strings.ReplaceAll(r.stdout, dir+"/", "")
	return r
}

// mistakes returns what stderr must hold for these lines.
func mistakes(lines ...string) string {
	end := fmt.Sprintf("%d problems. Nothing was started.\n", len(lines))
	if len(lines) == 1 {
		end = "1 problem. Nothing was started.\n"
	}
	return strings.Join(append(lines, end), "\n")
}

// No command prints a secret, whether its configuration is sound, wrong in one place or wrong in the secrets
// themselves.
func TestNothingPrintsSecrets(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	const key = "aHVudGVyMmh1bnRlcjJodW50ZXIyaHVudGVyMg=="
	config := func(more string) string {
		return writeFile(t, filepath.Join(t.TempDir(), usualFile), `
database: {url: postgres://u:hunter2-db@127.0.0.1:1/db}
destinations:
  a:
    url: https://a/?hunter2-query
    signing_secrets: [whsec_`+key+`]
    headers: {X-Token: hunter2-token}
    basic_auth: {username: u, password: hunter2-basic}
  b: {url: https://b, bearer_token: hunter2-bearer}
egress: {proxy: "http://u:hunter2-proxy@127.0.0.1:1"}
alerts: {channels: [{slack: https://hooks.slack.com/hunter2-slack}, {webhook: https://ops/hunter2-webhook}]}
`+more)
	}
	files := map[string]string{
		"sound": config(""),
		"wrong": config("rely: {}\n"),
		"wrong secrets": writeFile(t, filepath.Join(t.TempDir(), usualFile), `
database: {url: "postgres://u:hunter2-db@ter@h:x/db"}
destinations:
  a:
    url: https://u:hunter2-user@a/
    signing_secrets: [whsec_`+key+`hunter2, hunter2]
    headers: {Authorization: "hunter2-token\n"}
    basic_auth: {username: "hunter2:x", password: "hunter2-basic\n"}
    proxy: "https://u:hunter2-proxy@p"
  b: {url: https://b, bearer_token: Bearer hunter2-bearer}
  c: {url: https://c, bearer_token: hunter2-bearer, headers: {authorization: hunter2-header}}
egress: {proxy: "http://u:hunter2/proxy@p:1"}
alerts: {channels: [{slack: hunter2-slack}, {webhook: "https://ops/hunter2-webhook/%zz"}]}
`),
	}
	for name, file := range files {
		for _, args := range [][]string{
			{"run"},
			{"run", "--log-format=console", "--log-level=debug"},
			{"status"},
			{"status", "--json"},
			{"status", "--healthcheck"},
			{"migrate", "up"},
			{"migrate", "up", "--schema=s"},
			{"migrate", "down"},
			{"migrate", "status"},
			{"config", "check"},
			{"config", "show"},
			{"version"},
		} {
			t.Run(name+" "+strings.Join(args, " "), func(t *testing.T) {
				t.Parallel()
				signals := make(chan os.Signal, 1)
				if args[0] == "run" {
					signals <- syscall.SIGTERM
				}
				var stdout, stderr buffer
				if args[0] != "version" {
					args = append(args, "--config", file)
				}
				m := Main{Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr, Signals: signals}
				code := m.Run(args)
				if (code == 0) != (stderr.String() == "") && args[0] != "run" {
					t.Errorf("exit code %d with stderr %q", code, stderr.String())
				}
				for _, canary := range []string{"hunter2", key} {
					if strings.Contains(stdout.String()+stderr.String(), canary) {
						t.Errorf("%s leaks:\n%s\n%s", canary, stdout.String(), stderr.String())
					}
				}
			})
		}
	}
}
