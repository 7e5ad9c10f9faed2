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
)

// A manifest holds the parts of a Kubernetes object that this repository relies on. Only those are checked.
type manifest struct {
	Kind string
	Data map[string]string `yaml:"stringData"`
	Spec struct {
		Template struct {
			Spec podSpec
		}
	}
}

type podSpec struct {
	TerminationGracePeriodSeconds int             `yaml:"terminationGracePeriodSeconds"`
	RestartPolicy                 string          `yaml:"restartPolicy"`
	SecurityContext               securityContext `yaml:"securityContext"`
	InitContainers                []container     `yaml:"initContainers"`
	Containers                    []container
}

type securityContext struct {
	RunAsNonRoot             bool  `yaml:"runAsNonRoot"`
	AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
	ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
}

type container struct {
	Name          string
	Image         string
	RestartPolicy string `yaml:"restartPolicy"`
	Args          []string
	Env           []struct {
		Name      string
		Value     string
		ValueFrom struct {
			SecretKeyRef struct{ Name, Key string } `yaml:"secretKeyRef"`
			FieldRef     struct {
				FieldPath string `yaml:"fieldPath"`
			} `yaml:"fieldRef"`
		} `yaml:"valueFrom"`
	}
	LivenessProbe struct {
		HTTPGet struct{ Path string } `yaml:"httpGet"`
	} `yaml:"livenessProbe"`
	SecurityContext securityContext `yaml:"securityContext"`
}

const testSecret = "whsec_YXJjaHRlc3QtYXJjaHRlc3QtYXJjaHRlc3Qh"

func testKubernetesManifest(t *testing.T, relay string) {
	objects, err := decode[manifest](read(t, "docs/deploy/kubernetes.yaml"), false)
	if err != nil {
		t.Fatal(err)
	}
	secrets := map[string]string{}
	seen := map[string]bool{}
	for _, o := range objects {
		seen[o.Kind] = true
		for key, value := range o.Data {
			secrets[key] = strings.NewReplacer("whsec_CHANGE-ME", testSecret, "CHANGE-ME-CHANGE-ME", "archtest-archtest-archtest").Replace(value)
		}
	}
	for _, kind := range []string{"Secret", "Job", "Deployment"} {
		if !seen[kind] {
			t.Errorf("there is no %s", kind)
		}
	}
	for _, o := range objects {
		pod := o.Spec.Template.Spec
		for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
			if !strings.HasPrefix(c.Image, "outbox-relay:") {
				continue
			}
			if err := understood(t, relay, c.Args...); err != nil {
				t.Errorf("%s: %v", c.Name, err)
			}
			security := c.SecurityContext
			if !security.RunAsNonRoot && !pod.SecurityContext.RunAsNonRoot || !security.ReadOnlyRootFilesystem ||
				security.AllowPrivilegeEscalation == nil || *security.AllowPrivilegeEscalation {
				t.Errorf("%s: has more rights than it needs: %+v", c.Name, security)
			}
			var env []string
			for _, e := range c.Env {
				switch ref := e.ValueFrom.SecretKeyRef; {
				case ref.Key != "" && secrets[ref.Key] == "":
					t.Errorf("%s: there is no secret %q", c.Name, ref.Key)
				case ref.Key != "":
					e.Value = secrets[ref.Key]
				case e.ValueFrom.FieldRef.FieldPath != "":
					e.Value = "finance-0"
				}
				env = append(env, e.Name+"="+e.Value)
			}
			if o.Kind == "Job" { // it has no destination
				continue
			}
			if err := configured(t, relay, env); err != nil {
				t.Errorf("%s: %v", c.Name, err)
			}
			if c.LivenessProbe.HTTPGet.Path != "/healthz" || !slices.Contains(env, "OUTBOX_METRICS_LISTEN=:9464") {
				t.Errorf("%s: the kubelet cannot see its health", c.Name)
			}
			if c.RestartPolicy != "Always" || !slices.ContainsFunc(pod.InitContainers, func(i container) bool { return i.Name == c.Name }) {
				t.Errorf("%s: is no native sidecar", c.Name)
			}
			if pod.TerminationGracePeriodSeconds < 30 {
				t.Errorf("%s: %d s are not enough for a drain of 20 s and the settles after it", c.Name, pod.TerminationGracePeriodSeconds)
			}
		}
	}
}

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
	if err != nil {
		t.Fatal(err)
	}
	args := strings.Fields(u["ExecStart"][0])[1:]
	if err := understood(t, relay, args...); err != nil {
		t.Error(err)
	}
	// What systemd would put into the directory of credentials, and a configuration that refers to it.
	credentials := t.TempDir()
	for _, load := range u["LoadCredential"] {
		name, _, _ := strings.Cut(load, ":")
		content, ok := map[string]string{"database-url": "postgres://localhost/finance", "signing-secret": testSecret}[name]
		if !ok {
			t.Fatalf("what is in the credential %s?", name)
		}
		if err := os.WriteFile(filepath.Join(credentials, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	config := filepath.Join(credentials, "outbox-relay.yaml")
	yaml := "destinations: {logistics: {url: \"https://logistics.internal/\", signing_secrets: [\"${OUTBOX_SIGNING_SECRET}\"]}}\n"
	if err := os.WriteFile(config, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
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

// testUnitInSystemd has systemd read the unit: it refuses what is impossible, and ignores with a warning what it does not know.
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
			if err := os.WriteFile(file, []byte(strings.Replace(text, test.old, test.new, 1)), 0o600); err != nil {
				t.Fatal(err)
			}
			out, err := exec.CommandContext(t.Context(), analyze, "verify", "--man=no", file).CombinedOutput()
			if refused := err != nil || len(out) > 0; refused != (test.want != "") || !strings.Contains(string(out), test.want) {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
