package archtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// TestDeployment checks what people copy to run the relay, against the programs that it starts.
func TestDeployment(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	relay, demo := program(t, "outbox-relay"), program(t, "demo")
	t.Run("compose", func(t *testing.T) { testComposeFile(t, relay, demo) })
	t.Run("image", func(t *testing.T) { testDockerfile(t, relay, demo) })
	t.Run("systemd", func(t *testing.T) { testSystemdUnit(t, relay) })
	t.Run("systemd reads the unit", func(t *testing.T) { testUnitInSystemd(t, relay) })
	t.Run("calls in documents", func(t *testing.T) { testDocumentedCalls(t, relay) })
	t.Run("configurations in documents", func(t *testing.T) { testDocumentedConfigurations(t, relay) })
}

// program builds a command and returns where it lies.
func program(t *testing.T, name string) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), name)
	if out, err := goCommand(t, "build", "-buildvcs=false", "-o", binary, "./cmd/"+name).CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	return binary
}

// understood reports whether a program knows a command with all its flags: with --help it looks at
// no more.
func understood(t *testing.T, binary string, args ...string) error {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binary, append(slices.Clone(args), "--help")...)
	cmd.Env, cmd.Dir = []string{}, t.TempDir()
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", filepath.Base(binary), strings.Join(args, " "), err, out)
	}
	return nil
}

// configured reports whether outbox-relay takes an environment without a mistake or a warning.
func configured(t *testing.T, binary string, env []string, flags ...string) error {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binary, append([]string{"config", "check"}, flags...)...)
	cmd.Env, cmd.Dir = append([]string{}, env...), t.TempDir()
	out, err := cmd.CombinedOutput()
	if err == nil && strings.Contains(string(out), "warning") {
		err = errors.New("it warns")
	}
	if err != nil {
		return fmt.Errorf("config check with %s: %w\n%s", strings.Join(env, " "), err, out)
	}
	return nil
}

// A compose is what docker-compose.yml may hold; the Compose specification has more.
type compose struct {
	Postgres any                `yaml:"x-postgres"`
	Relay    any                `yaml:"x-relay"`
	Services map[string]service `yaml:"services"`
	Volumes  map[string]any     `yaml:"volumes"`
}

type service struct {
	Image       string `yaml:"image"`
	Build       struct{ Context, Target string }
	Command     []string          `yaml:"command"`
	Environment map[string]string `yaml:"environment"`
	Healthcheck struct {
		Test              []string
		Interval, Timeout string
		Retries           int
		Disable           bool
	} `yaml:"healthcheck"`
	DependsOn map[string]struct {
		Condition string
	} `yaml:"depends_on"`
	Restart         string   `yaml:"restart"`
	StopGracePeriod string   `yaml:"stop_grace_period"`
	Volumes         []string `yaml:"volumes"`
	ReadOnly        bool     `yaml:"read_only"`
	CapDrop         []string `yaml:"cap_drop"`
	SecurityOpt     []string `yaml:"security_opt"`
	Init            bool     `yaml:"init"`
	Ports           []string `yaml:"ports"`
}

// checkCompose returns what would not start. What a program understands is asked of run and
// settings.
func checkCompose(text string, stages []string, run func(target string, args []string) error, settings func(env map[string]string) error) (violations []string) {
	var file compose
	decoder := yaml.NewDecoder(strings.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(&file); err != nil {
		return []string{fmt.Sprintf("docker-compose.yml: %v", err)}
	}
	if err := decoder.Decode(&file); !errors.Is(err, io.EOF) {
		return []string{fmt.Sprintf("docker-compose.yml: more than one document, %v", err)}
	}
	for name, s := range file.Services {
		report := func(format string, args ...any) {
			violations = append(violations, fmt.Sprintf("docker-compose.yml: %s: %s", name, fmt.Sprintf(format, args...)))
		}
		if (s.Build.Context == "") != strings.Contains(s.Image, ":") {
			report("image %q: what is built here has no tag, what is pulled has one", s.Image)
		}
		if s.Build.Context == "" && !pinned.MatchString(s.Image) {
			report("image %q is not named by its digest, so that another one may come under its tag", s.Image)
		}
		if s.Build.Context != "" && !slices.Contains(stages, s.Build.Target) {
			report("the Dockerfile has no stage %q", s.Build.Target)
		}
		if s.Build.Context != "" {
			if err := run(s.Build.Target, s.Command); err != nil {
				report("%v", err)
			}
		}
		for other, dependency := range s.DependsOn {
			needed, ok := file.Services[other]
			once := needed.Restart == ""
			switch {
			case !ok:
				report("depends on %s, which does not exist", other)
			case dependency.Condition == "service_healthy" && len(needed.Healthcheck.Test) == 0:
				report("waits for the health of %s, which has no health check", other)
			case dependency.Condition == "service_completed_successfully" && !once:
				report("waits for the end of %s, which is always restarted", other)
			case dependency.Condition != "service_healthy" && dependency.Condition != "service_completed_successfully":
				report("waits for %s only to start", other)
			}
		}
		for _, port := range s.Ports {
			if !strings.HasPrefix(port, "127.0.0.1:") {
				report("port %s is open to other hosts", port)
			}
		}
		for _, volume := range s.Volumes {
			if volume, _, _ := strings.Cut(volume, ":"); !hasKey(file.Volumes, volume) {
				report("there is no volume %s", volume)
			}
		}
		if slices.Equal(s.Command, []string{"run"}) {
			if err := settings(s.Environment); err != nil {
				report("%v", err)
			}
		}
	}
	slices.Sort(violations)
	return violations
}

// pinned is the name of an image with a tag, for people, and a digest, which decides.
var pinned = regexp.MustCompile(`^[a-z0-9./-]+:[\w.-]+@sha256:[0-9a-f]{64}$`)

func hasKey[V any](m map[string]V, key string) bool {
	_, ok := m[key]
	return ok
}

func pairs(env map[string]string) (list []string) {
	for name, value := range env {
		list = append(list, name+"="+value)
	}
	return list
}

func testComposeFile(t *testing.T, relay, demo string) {
	binaries := map[string]string{"relay": relay, "demo": demo}
	run := func(target string, args []string) error { return understood(t, binaries[target], args...) }
	settings := func(env map[string]string) error { return configured(t, relay, pairs(env)) }
	check := func(text string) []string {
		var stages []string
		for _, s := range dockerStages(read(t, "Dockerfile")) {
			stages = append(stages, s.name)
		}
		return checkCompose(text, stages, run, settings)
	}
	text := read(t, "docker-compose.yml")
	for _, violation := range check(text) {
		t.Error(violation)
	}
	for name, change := range map[string][2]string{
		"a version":               {"services:\n", "version: '3'\nservices:\n"},
		"a key that is none":      {"    init: true", "    initt: true"},
		"a stage that is none":    {"target: demo}", "target: sample}"},
		"a service that is none":  {"      logistics-tables: {condition", "      logistics-table: {condition"},
		"no health check":         {"      finance-migrate: {condition: service_completed_successfully}", "      logistics: {condition: service_healthy}"},
		"an endless wait":         {"      finance-migrate: {condition: service_completed_successfully}", "      logistics: {condition: service_completed_successfully}"},
		"no condition":            {"      logistics-db: {condition: service_healthy}", "      logistics-db: {}"},
		"a volume that is none":   {"\n  finance:\n  logistics:\n", "\n  finance:\n"},
		"a command that is none":  {"[migrate, up]", "[migrate, upp]"},
		"a flag that is none":     {"--listen", "--listn"},
		"a setting that is none":  {"OUTBOX_DESTINATION_URL:", "OUTBOX_DESTINATIONURL:"},
		"a setting that is wrong": {"http://logistics:8080", "ftp://logistics:8080"},
		"an image without a tag":  {"image: *postgres-image\n    environment:\n      PGHOST: finance-db", "image: postgres\n    environment:\n      PGHOST: finance-db"},
		"no digest":               {"image: *postgres-image\n    environment:\n      PGHOST: finance-db", "image: postgres:17-alpine\n    environment:\n      PGHOST: finance-db"},
		"half a digest":           {"742f40ea20b9", "742f"},
	} {
		changed := strings.Replace(text, change[0], change[1], 1)
		if changed == text {
			t.Errorf("%s: nothing was changed", name)
		} else if len(check(changed)) == 0 {
			t.Errorf("%s: was accepted", name)
		}
	}
}

// A dockerStage is one FROM of a Dockerfile and the instructions below it.
type dockerStage struct {
	name, from   string
	instructions []instruction
}

type instruction struct{ name, rest string }

func dockerStages(text string) (stages []dockerStage) {
	text = strings.ReplaceAll(text, "\\\n", " ")
	for line := range strings.Lines(text) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == "" || strings.HasPrefix(name, "#") {
			continue
		}
		if name == "FROM" {
			words := slices.DeleteFunc(strings.Fields(rest), func(word string) bool { return strings.HasPrefix(word, "--") })
			stage := dockerStage{from: words[0]}
			if len(words) == 3 && words[1] == "AS" {
				stage.name = words[2]
			}
			stages = append(stages, stage)
		} else if last := len(stages) - 1; last >= 0 {
			stages[last].instructions = append(stages[last].instructions, instruction{name, rest})
		}
	}
	return stages
}

func (s dockerStage) get(name string) (found []string) {
	for _, i := range s.instructions {
		if i.name == name {
			found = append(found, i.rest)
		}
	}
	return found
}

// checkImage returns what is wrong with a final stage: it must be empty but for its program, run as
// nobody, and start that program without a shell, whose signals would not reach it.
func checkImage(s dockerStage, run func(binary string, args []string) error) (violations []string) {
	report := func(format string, args ...any) {
		violations = append(violations, fmt.Sprintf("Dockerfile: %s: %s", s.name, fmt.Sprintf(format, args...)))
	}
	if s.from != "scratch" {
		report("is made from %s, want scratch", s.from)
	}
	if user := s.get("USER"); len(user) != 1 || user[0] != "65532:65532" {
		report("runs as %q, want 65532:65532", user)
	}
	command := func(texts []string) (list []string) {
		if len(texts) != 1 || json.Unmarshal([]byte(texts[0]), &list) != nil {
			report("%q is not one list of arguments", texts)
		}
		return list
	}
	entry := command(s.get("ENTRYPOINT"))
	if len(entry) == 0 {
		return violations
	}
	commands := [][]string{entry}
	if cmd := s.get("CMD"); len(cmd) > 0 {
		commands[0] = append(slices.Clone(entry), command(cmd)...)
	}
	for _, check := range s.get("HEALTHCHECK") {
		_, check, _ := strings.Cut(check, "CMD ")
		commands = append(commands, command([]string{check}))
	}
	for _, c := range commands {
		inside := slices.ContainsFunc(s.get("COPY"), func(copied string) bool { return len(c) > 0 && strings.HasSuffix(copied, " "+c[0]) })
		if !inside {
			report("%q is not in the image", c)
		} else if err := run(path.Base(c[0]), c[1:]); err != nil {
			report("%v", err)
		}
	}
	return violations
}

func testDockerfile(t *testing.T, relay, demo string) {
	binaries := map[string]string{"outbox-relay": relay, "demo": demo}
	run := func(binary string, args []string) error { return understood(t, binaries[binary], args...) }
	text := read(t, "Dockerfile")
	stages := dockerStages(text)
	if last := stages[len(stages)-1]; last.name != "relay" || len(last.get("HEALTHCHECK")) != 1 {
		t.Errorf("docker build makes %q by default, want the relay with its health check", last.name)
	}
	for _, s := range stages[1:] {
		for _, violation := range checkImage(s, run) {
			t.Error(violation)
		}
	}
	for name, change := range map[string][2]string{
		"a base image":         {"FROM scratch AS relay", "FROM debian AS relay"},
		"root":                 {"USER 65532:65532\n# Says", "# Says"},
		"a shell":              {`ENTRYPOINT ["/outbox-relay"]`, "ENTRYPOINT /outbox-relay"},
		"another place":        {`ENTRYPOINT ["/outbox-relay"]`, `ENTRYPOINT ["/relay"]`},
		"an unknown command":   {`CMD ["run"]`, `CMD ["serve"]`},
		"an unknown flag":      {`"--healthcheck"]`, `"--health"]`},
		"a health check by sh": {`CMD ["/outbox-relay", "status", "--healthcheck"]`, "CMD /outbox-relay status --healthcheck"},
	} {
		changed := dockerStages(strings.Replace(text, change[0], change[1], 1))
		if found := checkImage(changed[len(changed)-1], run); len(found) == 0 {
			t.Errorf("%s: was accepted", name)
		}
	}

	build := stages[0]
	if version := goVersion.FindStringSubmatch(read(t, "go.mod"))[1]; !strings.HasPrefix(build.from, "golang:"+version+"@") || !pinned.MatchString(build.from) {
		t.Errorf("the Dockerfile builds with %s, want the image of go.mod's version, %s, by its digest", build.from, version)
	}
	if env := build.get("ENV"); len(env) != 1 || !strings.Contains(env[0], "CGO_ENABLED=0") {
		t.Errorf("the Dockerfile builds with %q, want static programs: CGO_ENABLED=0", env)
	}
	ignored := read(t, ".dockerignore")
	for _, p := range list(t, true, "./cmd/...") {
		dir, ours := strings.CutPrefix(p.ImportPath, module+"/")
		top, _, _ := strings.Cut(dir, "/")
		if ours && !strings.Contains(ignored, "\n!"+top+"\n") {
			t.Errorf(".dockerignore keeps %s out of the build, which needs %s", top, p.ImportPath)
		}
	}
}

var (
	goVersion    = regexp.MustCompile(`(?m)^go (\d+\.\d+)`)
	gooseVersion = regexp.MustCompile(`github\.com/pressly/goose/v3 (v\S+)`)
	goosePin     = regexp.MustCompile(`(?m)^GOOSE_VERSION\s*:= (\S+)$`)
)

// The stock CLI proves something only if it is of the version that the relay applies its migrations
// with.
func TestGooseVersionsAgree(t *testing.T) {
	t.Parallel()
	library, cli := gooseVersion.FindStringSubmatch(read(t, "go.mod")), goosePin.FindStringSubmatch(read(t, "Makefile"))
	if library == nil || cli == nil || library[1] != cli[1] {
		t.Errorf("go.mod has goose %q, the Makefile %q", library, cli)
	}
}
