package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/mod/semver"
)

// check refuses what must not be released, and reads commit, time and notes.
func (r *release) check(ctx context.Context) error {
	if err := checkVersion(r.version); err != nil {
		return err
	}
	if err := r.checkPlatforms(); err != nil {
		return err
	}
	commit, err := r.git(ctx, "rev-parse", "HEAD")
	if err != nil {
		return err
	}
	r.commit = commit
	changed, err := r.git(ctx, "status", "--porcelain")
	if err != nil {
		return err
	}
	if changed != "" {
		names := strings.Split(changed, "\n")
		return fmt.Errorf("the tree differs from commit %.12s in %d files, such as %q: commit or stash the changes", commit, len(names), names[0])
	}
	// Without the tag, rev-parse prints nothing and fails.
	if tagged, err := r.git(ctx, "rev-parse", "--quiet", "--verify", "refs/tags/"+r.version+"^{commit}"); err == nil && tagged != commit {
		return fmt.Errorf("the tag %s is at commit %.12s, and HEAD is %.12s: check out the tag to build it again, or choose another version", r.version, tagged, commit)
	}
	changes, err := os.ReadFile(filepath.Join(r.root, "CHANGELOG.md"))
	if err != nil {
		return err
	}
	if r.notes, err = section(string(changes), r.version); err != nil {
		return err
	}
	if r.epoch == "" {
		if r.epoch, err = r.git(ctx, "log", "-1", "--format=%ct"); err != nil {
			return err
		}
	}
	r.time, err = parseEpoch(r.epoch)
	return err
}

// checkVersion wants a complete semantic version. Build metadata is refused: a tag of an image cannot hold its "+".
func checkVersion(version string) error {
	if !semver.IsValid(version) || semver.Canonical(version) != version {
		return fmt.Errorf("the version %q is not semantic: write it as v1.2.3, or v1.2.3-rc.1 before a release: make release VERSION=v1.2.3", version)
	}
	return nil
}

// checkPlatforms wants each platform once, and one for the image.
func (r *release) checkPlatforms() error {
	for i, p := range r.platforms {
		if p.os == "" || p.arch == "" || slices.Contains(r.platforms[:i], p) {
			return fmt.Errorf("the platform %q is incomplete or named twice: write linux/amd64,darwin/arm64", p)
		}
	}
	if len(r.imagePlatforms()) == 0 {
		return errors.New("no platform is of Linux, so that the image would be empty: add linux/amd64")
	}
	return nil
}

var heading = regexp.MustCompile(`(?m)^## +\[?(v?[0-9][^\s\]]*)\]?(?: +[-(] *([0-9]{4}-[0-9]{2}-[0-9]{2})\)?)? *$`)

// section returns what a changelog says about a version: the lines below its heading, up to the next.
func section(changelog, version string) (string, error) {
	for _, at := range heading.FindAllStringSubmatchIndex(changelog, -1) {
		if name := changelog[at[2]:at[3]]; name != version && "v"+name != version {
			continue
		}
		if at[4] < 0 {
			return "", fmt.Errorf("the heading of %s in CHANGELOG.md has no date: write ## %s - 2006-01-02", version, version)
		}
		body, _, _ := strings.Cut(changelog[at[1]:], "\n## ")
		if body = strings.TrimSpace(body); body == "" {
			return "", fmt.Errorf("CHANGELOG.md says nothing about %s: write what users notice below its heading", version)
		}
		return body, nil
	}
	return "", fmt.Errorf("CHANGELOG.md has no section for %s: rename its heading Unreleased to %s - 2006-01-02 with the date of the release, and commit it", version, version)
}

// git returns what git prints about the repository.
func (r *release) git(ctx context.Context, args ...string) (string, error) {
	out, err := r.output(ctx, nil, "git", append([]string{"-C", r.root}, args...)...)
	return strings.TrimRight(string(out), "\n"), err
}

// output runs a program with additional variables and returns what it prints. An error has what the program said.
func (r *release) output(ctx context.Context, env []string, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var said bytes.Buffer
	cmd.Env, cmd.Stderr, cmd.Dir = append(os.Environ(), env...), &said, r.root
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, bytes.TrimSpace(said.Bytes()))
	}
	return out, nil
}
