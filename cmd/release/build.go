package main

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// host is the platform that runs this program, whose binary writes the manual page and the completions.
var host = platform{runtime.GOOS, runtime.GOARCH}

// buildBinaries builds the relay for every platform, and for this one.
func (r *release) buildBinaries(ctx context.Context) error {
	r.built = map[platform]string{}
	for _, p := range append(slices.Clone(r.platforms), host) {
		if r.built[p] != "" {
			continue
		}
		binary := filepath.Join(r.tmp, p.os+"-"+p.arch, "outbox-relay")
		// The Dockerfile builds with the same flags, and a test compares the bytes. What a machine may have configured
		// is set here, so that it does not change the result.
		env := []string{
			"CGO_ENABLED=0", "GOOS=" + p.os, "GOARCH=" + p.arch, "GOFLAGS=-mod=readonly", "GOWORK=off", "GOAMD64=v1", "GOARM64=v8.0",
		}
		_, err := r.output(ctx, env, "go", "build", "-trimpath", "-buildvcs=false",
			"-ldflags", "-s -w -X main.version="+r.version+" -X main.commit="+r.commit, "-o", binary, "./cmd/outbox-relay")
		if err != nil {
			return err
		}
		if err := r.verifyBinary(ctx, binary, p); err != nil {
			return err
		}
		r.built[p] = binary
	}
	return nil
}

// verifyBinary refuses a binary that is of another platform, another version, or not static. A build that sets a variable which
// the program no longer has succeeds, and its binary would have no version.
func (r *release) verifyBinary(ctx context.Context, binary string, p platform) error {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return fmt.Errorf("read what %s is made of: %w", binary, err)
	}
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	if got := (platform{settings["GOOS"], settings["GOARCH"]}); got != p || settings["CGO_ENABLED"] != "0" || settings["-trimpath"] != "true" {
		return fmt.Errorf("%s is of %s, with settings %v: want %s, static and with trimmed paths", binary, got, settings, p)
	}
	content, err := os.ReadFile(binary)
	if err != nil {
		return err
	}
	if !bytes.Contains(content, []byte(r.version)) || !bytes.Contains(content, []byte(r.commit)) {
		return fmt.Errorf("%s holds no version %s or no commit %s: does cmd/outbox-relay still have both variables?", binary, r.version, r.commit)
	}
	if p != host {
		return nil
	}
	out, err := r.output(ctx, nil, binary, "version", "--json")
	if err != nil {
		return err
	}
	var said struct {
		Version string `json:"version"`
		Commit  string `json:"commit"`
	}
	if err := json.Unmarshal(out, &said); err != nil {
		return fmt.Errorf("read the version of %s: %w", binary, err)
	}
	if said.Version != r.version || said.Commit != r.commit {
		return fmt.Errorf("%s says that it is version %q of commit %q, want %s of %s", binary, said.Version, said.Commit, r.version, r.commit)
	}
	return nil
}

// packBinaries writes an archive for each platform.
func (r *release) packBinaries(ctx context.Context) error {
	common, err := r.commonFiles(ctx)
	if err != nil {
		return err
	}
	for _, p := range r.platforms {
		content, err := os.ReadFile(r.built[p])
		if err != nil {
			return err
		}
		files := append(slices.Clone(common), file{name: "outbox-relay", content: content, program: true})
		for i := range files {
			files[i].name = r.name(p) + "/" + files[i].name
		}
		archive, err := archiveOf(files, r.time)
		if err != nil {
			return err
		}
		if archive, err = compress(archive); err != nil {
			return err
		}
		if err := r.write(r.name(p)+".tar.gz", archive); err != nil {
			return err
		}
	}
	return nil
}

// commonFiles returns what every archive has beside its binary.
func (r *release) commonFiles(ctx context.Context) (files []file, err error) {
	for name, from := range map[string]string{
		"LICENSE": "LICENSE", "README.md": "README.md", "CHANGELOG.md": "CHANGELOG.md", "migrations": "migrations/*.sql", "migrations/outbox": "migrations/outbox/*.sql",
		"migrations/inbox": "migrations/inbox/*.sql", "deploy": "docs/deploy/*.*", "docs": "docs/*.md",
	} {
		found, err := filepath.Glob(filepath.Join(r.root, from))
		if err != nil {
			return nil, err
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("no file is at %s, which archives contain", from)
		}
		for _, path := range found {
			content, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			f := file{name: name, content: content}
			if name != from {
				f.name += "/" + filepath.Base(path)
			}
			files = append(files, f)
		}
	}
	for name, args := range map[string][]string{
		"man/outbox-relay.1": {"man"}, "completions/outbox-relay.bash": {"completion", "bash"},
		"completions/outbox-relay.zsh": {"completion", "zsh"}, "completions/outbox-relay.fish": {"completion", "fish"},
	} {
		text, err := r.output(ctx, nil, r.built[host], args...)
		if err != nil {
			return nil, err
		}
		files = append(files, file{name: name, content: text})
	}
	notices, err := r.notices(ctx)
	return append(files, file{name: "THIRD-PARTY-LICENSES.txt", content: notices}), err
}

// packChart packs the Helm chart with the version of the release, whose image it names.
func (r *release) packChart(context.Context) error {
	root := filepath.Join(r.root, "docs/deploy/helm/outbox-relay")
	var files []file
	err := filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if name == "Chart.yaml" {
			content = chartVersion.ReplaceAll(content, []byte("version: "+strings.TrimPrefix(r.version, "v")))
			content = appVersion.ReplaceAll(content, []byte("appVersion: "+r.version))
		}
		files = append(files, file{name: "outbox-relay/" + filepath.ToSlash(name), content: content})
		return err
	})
	if err != nil {
		return err
	}
	archive, err := archiveOf(files, r.time)
	if err != nil {
		return err
	}
	if archive, err = compress(archive); err != nil {
		return err
	}
	return r.write("outbox-relay-chart-"+r.version+".tgz", archive)
}

// describeModules lists the modules of each binary, and checks their licences.
func (r *release) describeModules(ctx context.Context) error {
	sbom := filepath.Join(r.tmp, "sbom")
	if _, err := r.output(ctx, nil, "go", "build", "-C", "cmd/sbom", "-o", sbom, "."); err != nil {
		return err
	}
	for _, p := range r.platforms {
		// The modules of tests and of other systems are not listed, since the binary has none of them.
		text, err := r.output(ctx, []string{"GOOS=" + p.os, "GOARCH=" + p.arch}, sbom, "-binary", r.built[p], "-version", r.version, ".")
		if err != nil {
			return err
		}
		if err := r.write(r.name(p)+".cdx.json", text); err != nil {
			return err
		}
	}
	return nil
}
