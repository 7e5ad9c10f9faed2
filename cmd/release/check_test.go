package main

import (
	"io"
	"path/filepath"
	"strings"
	"testing"
)

// TestRefused tries what must not be released. What is refused costs no build.
func TestRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		version, changelog string
		prepare            func(t *testing.T, dir string)
		want               string // of the error; empty: accepted
	}{
		"a release":                   {version: "v1.2.3"},
		"a candidate":                 {version: "v1.2.3-rc.1", changelog: "## v1.2.3-rc.1 (2026-01-02)\n\nx\n"},
		"in brackets":                 {version: "v1.2.3", changelog: "## [1.2.3] - 2026-01-02\n\nx\n\n## [1.2.2] - 2025-01-02\n"},
		"no version":                  {version: "", want: "is not semantic: write it as v1.2.3"},
		"no v":                        {version: "1.2.3", want: "is not semantic"},
		"a part":                      {version: "v1.2", want: "is not semantic"},
		"what git describes":          {version: "v1.2.3+5-gabcdef", want: "is not semantic"},
		"a path":                      {version: "v1.2.3/../../x", want: "is not semantic"},
		"not in the changelog":        {version: "v1.2.4", want: "CHANGELOG.md has no section for v1.2.4: rename its heading Unreleased to v1.2.4 - "},
		"a part of another":           {version: "v1.2.3", changelog: "## v1.2.30 - 2026-01-02\n\nx\n", want: "has no section for v1.2.3"},
		"without a date":              {version: "v1.2.3", changelog: "## v1.2.3\n\nx\n", want: "has no date"},
		"without a word":              {version: "v1.2.3", changelog: "## v1.2.3 - 2026-01-02\n\n## v1.2.2 - 2025-01-02\n\nx\n", want: "says nothing about v1.2.3"},
		"a changed file":              {version: "v1.2.3", prepare: func(t *testing.T, dir string) { write(t, dir+"/CHANGELOG.md", "x") }, want: "in 1 files, such as \" M CHANGELOG.md\": commit or stash"},
		"a new file":                  {version: "v1.2.3", prepare: func(t *testing.T, dir string) { write(t, dir+"/a.go", "x") }, want: "such as \"?? a.go\""},
		"a tag here":                  {version: "v1.2.3", prepare: func(t *testing.T, dir string) { execute(t, dir, nil, "git", "tag", "v1.2.3") }},
		"a tag at another commit":     {version: "v1.2.3", prepare: tagAndGoOn, want: "the tag v1.2.3 is at commit "},
		"what is no repository":       {version: "v1.2.3", prepare: func(t *testing.T, dir string) { execute(t, dir, nil, "rm", "-r", ".git") }, want: "not a git repository"},
		"a time before there was one": {version: "v1.2.3", prepare: func(*testing.T, string) {}, want: "SOURCE_DATE_EPOCH \"soon\" is no number"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "tree")
			if c.changelog == "" {
				c.changelog = "# Changelog\n\n## Unreleased\n\n## v1.2.3 - 2026-01-02\n\n- One.\n- Two.\n\n## v1.2.2 - 2025-01-02\n\n- Zero.\n"
			}
			write(t, dir+"/CHANGELOG.md", c.changelog)
			commit(t, dir)
			if c.prepare != nil {
				c.prepare(t, dir)
			}
			r := release{root: dir, version: c.version, platforms: platforms(), log: io.Discard}
			if strings.Contains(c.want, "EPOCH") {
				r.epoch = "soon"
			}
			err := r.check(t.Context())
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if err == nil && (r.notes == "" || strings.Contains(r.notes, "#") || strings.Contains(r.notes, "Zero") || r.time.Year() != 2026) {
				t.Errorf("the notes of %v are %q", r.time, r.notes)
			}
		})
	}
}

// tagAndGoOn leaves the tag at a commit before HEAD, as when another release was made of that version.
func tagAndGoOn(t *testing.T, dir string) {
	t.Helper()
	execute(t, dir, nil, "git", "-c", "user.name=a", "-c", "user.email=a@example.com", "tag", "--annotate", "--message", "x", "v1.2.3")
	write(t, dir+"/more", "x")
	commit(t, dir)
}

func TestPlatforms(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		platforms []platform
		want      string
	}{
		"one":           {[]platform{{"linux", "amd64"}}, ""},
		"none":          {nil, "no platform is of Linux"},
		"no image":      {[]platform{{"darwin", "arm64"}}, "no platform is of Linux"},
		"half":          {[]platform{{"linux", ""}}, "is incomplete"},
		"one two times": {[]platform{{"linux", "amd64"}, {"linux", "amd64"}}, "named twice"},
	} {
		err := (&release{platforms: c.platforms}).checkPlatforms()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}
