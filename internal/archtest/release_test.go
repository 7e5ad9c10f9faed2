package archtest

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// wrongRelease returns what is wrong with a configuration of goreleaser that goreleaser accepts:
// files that archives would lack, and flags that the Dockerfile does not build with.
func wrongRelease(t *testing.T, config, dockerfile string) (violations []string) {
	t.Helper()
	var release struct {
		Builds []struct {
			ID             string
			Main           string
			Flags, Ldflags []string
		}
		Archives []struct {
			ID    string
			Meta  bool
			Files []yaml.Node
		}
	}
	if err := yaml.Unmarshal([]byte(config), &release); err != nil {
		t.Fatalf(".goreleaser.yaml: %v", err)
	}
	report := func(format string, args ...any) {
		violations = append(violations, ".goreleaser.yaml: "+fmt.Sprintf(format, args...))
	}
	names := tree(t)
	for _, archive := range release.Archives {
		for _, node := range archive.Files {
			var file struct{ Src string }
			if node.Kind != yaml.MappingNode {
				continue // none*, which packs the binary alone
			}
			if err := node.Decode(&file); err != nil {
				t.Fatalf(".goreleaser.yaml: %v", err)
			}
			matches := func(name string) bool { ok, _ := path.Match(file.Src, name); return ok }
			if !strings.HasPrefix(file.Src, "bin/release-input/") && !slices.ContainsFunc(names, matches) {
				report("archive %s: no file matches %q, which goreleaser leaves out without a word", archive.ID, file.Src)
			}
		}
	}
	variables := strings.NewReplacer("{{ .Tag }}", "$VERSION", "{{ .FullCommit }}", "$COMMIT")
	for _, build := range release.Builds {
		command := fmt.Sprintf("RUN go build %s -ldflags %q -o /out/outbox-relay %s\n", strings.Join(build.Flags, " "),
			variables.Replace(strings.Join(build.Ldflags, " ")), build.Main)
		if !strings.Contains(dockerfile, command) {
			report("build %s: the Dockerfile does not have %s", build.ID, command)
		}
	}
	return violations
}

// make test-release tries the whole configuration, by a release. This test costs no build.
func TestReleaseConfiguration(t *testing.T) {
	t.Parallel()
	config, dockerfile := read(t, ".goreleaser.yaml"), read(t, "Dockerfile")
	for _, violation := range wrongRelease(t, config, dockerfile) {
		t.Error(violation)
	}
	for name, c := range map[string]struct {
		old, new string
		want     int
	}{
		"a missing file":  {"src: LICENSE", "src: LICENCE", 1},
		"a missing glob":  {"migrations/inbox/*.sql", "migrations/inboxes/*.sql", 1},
		"a flag":          {"-trimpath, ", "", 2},
		"a variable":      {"main.version", "main.release", 2},
		"another program": {"main: ./cmd/outbox-relay", "main: ./cmd/demo", 2},
	} {
		changed := strings.Replace(config, c.old, c.new, 1)
		if found := wrongRelease(t, changed, dockerfile); changed == config || len(found) != c.want {
			t.Errorf("%s: reported %q, want %d", name, found, c.want)
		}
	}
}
