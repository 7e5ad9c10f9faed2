package archtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

const testSecret = "whsec_YXJjaHRlc3QtYXJjaHRlc3QtYXJjaHRlc3Qh"

// A unit is a systemd unit: the values of each key, in order.
type unit map[string][]string

func parseUnit(text string) (unit, error) {
	u := unit{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' || line[0] == '[' {
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok {
			return nil, fmt.Errorf("%q is no assignment", line)
		}
		u[key] = append(u[key], value)
	}
	return u, nil
}

func testSystemdUnit(t *testing.T, relay string) {
	u, err := parseUnit(read(t, "docs/deploy/outbox-relay.service"))
	testkit.Must(t, err)
	args := strings.Fields(u["ExecStart"][0])[1:]
	if err := understood(t, relay, args...); err != nil {
		t.Error(err)
	}
	// What systemd would put into the directory of credentials, and a configuration that refers to
	// it.
	credentials := t.TempDir()
	for _, load := range u["LoadCredential"] {
		name, _, _ := strings.Cut(load, ":")
		content, ok := map[string]string{"database-url": "postgres://localhost/finance", "signing-secret": testSecret}[name]
		if !ok {
			t.Fatalf("what is in the credential %s?", name)
		}
		testkit.Must(t, os.WriteFile(filepath.Join(credentials, name), []byte(content), 0o600))
	}
	config := filepath.Join(credentials, "outbox-relay.yaml")
	yaml := "destinations: {logistics: {url: \"https://logistics.internal/\", signing_secrets: [\"${OUTBOX_SIGNING_SECRET}\"]}}\n"
	testkit.Must(t, os.WriteFile(config, []byte(yaml), 0o600))
	var env []string
	for _, variable := range u["Environment"] {
		env = append(env, strings.ReplaceAll(variable, "%d", credentials))
	}
	if err := configured(t, relay, env, "--config", config); err != nil {
		t.Error(err)
	}
	for key, want := range map[string]string{"DynamicUser": "yes", "NoNewPrivileges": "yes", "Restart": "always", "ExecReload": "/bin/kill -HUP $MAINPID"} {
		if !slices.Equal(u[key], []string{want}) {
			t.Errorf("%s=%q, want %s", key, u[key], want)
		}
	}
	if _, err := parseUnit("[Service]\nRestart always\n"); err == nil {
		t.Error("a line without = was accepted")
	}
	if err := configured(t, relay, []string{"OUTBOX_DATABASE_UR=x"}); err == nil || errors.Is(err, os.ErrNotExist) {
		t.Errorf("an incomplete environment was accepted: %v", err)
	}
}

// testUnitInSystemd has systemd read the unit: it refuses what is impossible, and ignores with a
// warning what it does not know.
func testUnitInSystemd(t *testing.T, relay string) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	text := strings.ReplaceAll(read(t, "docs/deploy/outbox-relay.service"), "/usr/local/bin/outbox-relay", relay)
	for name, test := range map[string]struct{ old, new, want string }{
		"as it is":   {},
		"misspelt":   {"NoNewPrivileges=", "NoNewPrivilege=", "NoNewPrivilege"},
		"impossible": {"SystemCallFilter=@system-service", "SystemCallFilter=@sistem-service", "sistem-service"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "outbox-relay.service")
			testkit.Must(t, os.WriteFile(file, []byte(strings.Replace(text, test.old, test.new, 1)), 0o600))
			out, err := exec.CommandContext(t.Context(), analyze, "verify", "--man=no", file).CombinedOutput()
			if refused := err != nil || len(out) > 0; refused != (test.want != "") || !strings.Contains(string(out), test.want) {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
