package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	version = "v9.8.7"
	epoch   = "1767323045" // 2026-01-02T03:04:05Z, when the copies were committed
)

// platforms are this one and those of the image: the fewest that show all.
func platforms() []platform {
	all := []platform{{"linux", "amd64"}, {"linux", "arm64"}}
	if !slices.Contains(all, host) {
		all = append(all, host)
	}
	return all
}

// execute runs a program in a directory, with additional variables.
func execute(t *testing.T, dir string, env []string, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, name, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(name), 0o700))
	must(t, os.WriteFile(name, []byte(text), 0o600))
}

func read(t *testing.T, name string) string {
	t.Helper()
	content, err := os.ReadFile(name)
	must(t, err)
	return string(content)
}

// commit makes a repository of a directory, or commits what has changed in it, at a fixed time.
func commit(t *testing.T, dir string) {
	t.Helper()
	env := []string{"GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_DATE=" + epoch + " +0000", "GIT_COMMITTER_DATE=" + epoch + " +0000"}
	execute(t, dir, env, "git", "init", "--quiet")
	execute(t, dir, env, "git", "add", "--all")
	execute(t, dir, env, "git", "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "--quiet", "--message", "release")
}

// copyTree copies the repository, with what is not committed, and commits the copy with a section for the version.
func copyTree(t *testing.T, dir string) {
	t.Helper()
	for name := range strings.SplitSeq(execute(t, "../..", nil, "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"), "\x00") {
		if info, err := os.Stat(filepath.Join("../..", name)); errors.Is(err, fs.ErrNotExist) || err == nil && info.IsDir() {
			continue
		}
		text := read(t, filepath.Join("../..", name))
		if name == "CHANGELOG.md" {
			text = strings.Replace(text, "\n## Unreleased\n", "\n## Unreleased\n\n## "+version[1:]+" - 2026-01-02\n", 1)
		}
		write(t, filepath.Join(dir, name), text)
	}
	commit(t, dir)
}

func newRelease(t *testing.T, root string) *release {
	t.Helper()
	return &release{root: root, version: version, out: filepath.Join(root, "bin", "release"), platforms: platforms(), log: t.Output()}
}

// TestRelease releases a copy of this repository, and uses what came out as its users do.
func TestRelease(t *testing.T) {
	t.Parallel()
	root := filepath.Join(t.TempDir(), "first")
	copyTree(t, root)
	r := newRelease(t, root)
	must(t, r.run(t.Context()))
	t.Run("complete", func(t *testing.T) { testComplete(t, r) })
	t.Run("archives", func(t *testing.T) { testArchives(t, r) })
	t.Run("chart", func(t *testing.T) { testChart(t, r) })
	t.Run("image", func(t *testing.T) { testImage(t, r) })
	t.Run("Dockerfile", func(t *testing.T) { testDockerfile(t, r) })
	t.Run("another binary", func(t *testing.T) { testOtherBinary(t, r) })
	t.Run("again elsewhere", func(t *testing.T) {
		again := filepath.Join(t.TempDir(), "a-longer-name", "second")
		copyTree(t, again)
		second := newRelease(t, again)
		must(t, second.run(t.Context()))
		if first, second := read(t, filepath.Join(r.out, "SHA256SUMS")), read(t, filepath.Join(second.out, "SHA256SUMS")); first != second {
			t.Errorf("another directory gives other files:\n%s\n%s", first, second)
		}
	})
	t.Run("a changed tree", func(t *testing.T) {
		write(t, filepath.Join(root, "relay", "forgotten.go"), "package relay\n")
		err := newRelease(t, root).run(t.Context())
		if err == nil || !strings.Contains(err.Error(), "in 1 files, such as \"?? relay/forgotten.go\": commit or stash") {
			t.Errorf("it is released: %v", err)
		}
		if sums := read(t, filepath.Join(r.out, "SHA256SUMS")); sums == "" {
			t.Error("a refused run has removed the release before it")
		}
	})
}

func testComplete(t *testing.T, r *release) {
	want := []string{"RELEASE_NOTES.md", "SHA256SUMS", "outbox-relay-chart-" + version + ".tgz", "outbox-relay-" + version + "-image.oci.tar"}
	for _, p := range r.platforms {
		want = append(want, r.name(p)+".tar.gz", r.name(p)+".cdx.json")
	}
	entries, err := os.ReadDir(r.out)
	must(t, err)
	var got []string
	for _, entry := range entries {
		got = append(got, entry.Name())
	}
	slices.Sort(want)
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("there is %q, want %q", got, want)
	}
	sums := read(t, filepath.Join(r.out, "SHA256SUMS"))
	if said := execute(t, r.out, nil, "sha256sum", "--check", "--strict", "SHA256SUMS"); strings.Count(said, ": OK\n") != len(want)-1 {
		t.Errorf("%s\n%s", sums, said)
	}
	if beside, err := filepath.Glob(filepath.Join(filepath.Dir(r.out), ".release-*")); err != nil || len(beside) > 0 {
		t.Errorf("%q is left behind: %v", beside, err)
	}
	notes := read(t, filepath.Join(r.out, "RELEASE_NOTES.md"))
	for _, want := range []string{"### Added\n", "`relay`: routes and destinations", r.commit, "SOURCE_DATE_EPOCH=" + epoch} {
		if !strings.Contains(notes, want) {
			t.Errorf("the notes lack %q:\n%.400s", want, notes)
		}
	}
	for _, p := range r.platforms {
		text := read(t, filepath.Join(r.out, r.name(p)+".cdx.json"))
		if !strings.Contains(text, `"version": "`+version+`"`) || !strings.Contains(text, "pkg:golang/github.com/jackc/pgx/v5@") {
			t.Errorf("the modules of %s are not described:\n%.400s", p, text)
		}
	}
}

// unpack returns the files of a tar archive by name, with their modes.
func unpack(t *testing.T, content io.Reader) (texts map[string]string, modes map[string]fs.FileMode) {
	t.Helper()
	texts, modes = map[string]string{}, map[string]fs.FileMode{}
	for archive := tar.NewReader(content); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return texts, modes
		}
		must(t, err)
		if header.Uid != 0 || header.Gid != 0 || header.ModTime.Unix() != 1767323045 {
			t.Errorf("%s: has the owner %d or the time %v of a machine", header.Name, header.Uid, header.ModTime)
		}
		var text bytes.Buffer
		_, err = io.Copy(&text, archive)
		must(t, err)
		texts[header.Name], modes[header.Name] = text.String(), header.FileInfo().Mode()
	}
}

func unpackGzip(t *testing.T, name string) (texts map[string]string, modes map[string]fs.FileMode) {
	t.Helper()
	content, err := gzip.NewReader(strings.NewReader(read(t, name)))
	must(t, err)
	return unpack(t, content)
}

func testArchives(t *testing.T, r *release) {
	for _, p := range r.platforms {
		texts, modes := unpackGzip(t, filepath.Join(r.out, r.name(p)+".tar.gz"))
		for name, want := range map[string]string{
			"LICENSE": "MIT License", "README.md": "outbox-relay", "CHANGELOG.md": version[1:], "man/outbox-relay.1": ".TH OUTBOX-RELAY",
			"completions/outbox-relay.bash": "complete ", "completions/outbox-relay.zsh": "bashcompinit", "completions/outbox-relay.fish": "complete ",
			"migrations/roles.sql": "GRANT", "migrations/outbox/00001_event.sql": "+goose Up", "migrations/inbox/00001_processed_events.sql": "+goose Up",
			"deploy/outbox-relay.service": "ExecStart=", "deploy/prometheus-rules.yaml": "groups:", "deploy/grafana-dashboard.json": "panels", "docs/operations.md": "## Alert: ",
		} {
			if !strings.Contains(texts[r.name(p)+"/"+name], want) {
				t.Errorf("%s: %s lacks %q", p, name, want)
			}
		}
		notices := texts[r.name(p)+"/THIRD-PARTY-LICENSES.txt"]
		for _, of := range []string{"\nGo: LICENSE", "\ngithub.com/jackc/pgx/v5: LICENSE", "\nScripts of the page: uPlot.LICENSE", "htmx.LICENSE", "Apache License"} {
			if !strings.Contains(notices, of) {
				t.Errorf("the notices lack %q", of)
			}
		}
		program := r.name(p) + "/outbox-relay"
		if modes[program] != 0o755 || modes[r.name(p)+"/LICENSE"] != 0o644 {
			t.Errorf("%s: the modes are %v and %v", p, modes[program], modes[r.name(p)+"/LICENSE"])
		}
		if p == host {
			runVersion(t, r, texts[program])
		}
	}
}

// runVersion runs a binary that came out of an archive.
func runVersion(t *testing.T, r *release, program string) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "outbox-relay")
	must(t, os.WriteFile(name, []byte(program), 0o700))
	if said := execute(t, t.TempDir(), nil, name, "version"); !strings.HasPrefix(said, fmt.Sprintf("outbox-relay %s (commit %.12s)", version, r.commit)) {
		t.Errorf("the binary says %q", said)
	}
}

func testChart(t *testing.T, r *release) {
	texts, _ := unpackGzip(t, filepath.Join(r.out, "outbox-relay-chart-"+version+".tgz"))
	if chart := texts["outbox-relay/Chart.yaml"]; !strings.Contains(chart, "\nversion: "+version[1:]+"\n") || !strings.Contains(chart, "\nappVersion: "+version+"\n") {
		t.Errorf("the chart is of another version:\n%s", chart)
	}
	for _, name := range []string{"values.yaml", "values.schema.json", "templates/deployment.yaml", "templates/_helpers.tpl"} {
		if texts["outbox-relay/"+name] == "" {
			t.Errorf("the chart lacks %s", name)
		}
	}
}

// testOtherBinary finds out whether a binary that is not of the release would be released.
func testOtherBinary(t *testing.T, r *release) {
	program := filepath.Join(t.TempDir(), "outbox-relay")
	texts, _ := unpackGzip(t, filepath.Join(r.out, r.name(host)+".tar.gz"))
	must(t, os.WriteFile(program, []byte(texts[r.name(host)+"/outbox-relay"]), 0o700))
	must(t, r.verifyBinary(t.Context(), program, host))
	other := *r
	other.version = "v9.8.8"
	if err := other.verifyBinary(t.Context(), program, host); err == nil {
		t.Error("another version is accepted")
	}
	// A variable of another version may hold the text of this one.
	other.version = version[:3]
	if err := other.verifyBinary(t.Context(), program, host); err == nil || !strings.Contains(err.Error(), `says that it is version "v9.8.7"`) {
		t.Errorf("a part of the version is accepted: %v", err)
	}
	if err := r.verifyBinary(t.Context(), program, platform{"plan9", "amd64"}); err == nil {
		t.Error("another platform is accepted")
	}
	if err := r.verifyBinary(t.Context(), os.Args[0], host); err == nil {
		t.Error("a program that was built otherwise is accepted")
	}
}

func digest(content string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(content))) }
