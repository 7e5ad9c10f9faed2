// Command release builds what a release consists of, without a network, a registry or a container engine: static binaries in archives, a
// Helm chart, an image for two platforms, the modules of each binary (CycloneDX), notes and checksums. The same commit and the same Go give
// the same bytes. It publishes nothing: docs/deploy/release.md has the commands that do.
//
//	release -root . -version v1.2.3 -out bin/release/v1.2.3
//
// It refuses a version that is not semantic or that CHANGELOG.md does not have, a tree with uncommitted changes, and a version whose
// tag is at another commit. It is a module of its own, so that the relay's does not require what it needs.
package main

import (
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

func main() {
	var r release
	var platforms string
	flag.StringVar(&r.root, "root", ".", "the repository")
	flag.StringVar(&r.version, "version", "", "the version, such as v1.2.3")
	flag.StringVar(&r.out, "out", "", "the directory to write, which is replaced")
	flag.StringVar(&platforms, "platforms", "linux/amd64,linux/arm64,darwin/amd64,darwin/arm64", "the platforms of the archives; the image has those of Linux")
	flag.Parse()
	r.epoch, r.log = os.Getenv("SOURCE_DATE_EPOCH"), os.Stderr
	for name := range strings.SplitSeq(platforms, ",") {
		goos, arch, _ := strings.Cut(name, "/")
		r.platforms = append(r.platforms, platform{goos, arch})
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := r.run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// A platform is an operating system and an architecture, in Go's words.
type platform struct{ os, arch string }

func (p platform) String() string { return p.os + "/" + p.arch }

// A release is one run: what was asked for, and what the run has found out.
type release struct {
	root, version, out string
	epoch              string // SOURCE_DATE_EPOCH; empty: the time of the commit
	platforms          []platform
	log                io.Writer

	commit string
	time   time.Time           // of every file
	notes  string              // the version's section of CHANGELOG.md
	image  string              // the digest of the image of all platforms
	dir    string              // where files are written until the release is complete
	tmp    string              // what is not part of the release
	built  map[platform]string // binaries
}

// run builds into a directory beside the final one, so that a run that fails leaves no half release behind.
func (r *release) run(ctx context.Context) (err error) {
	if r.root, err = filepath.Abs(r.root); err != nil {
		return err
	}
	if err := r.check(ctx); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(r.out), 0o755); err != nil {
		return err
	}
	if r.tmp, err = os.MkdirTemp(filepath.Dir(r.out), ".release-"); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(r.tmp) }()
	r.dir = filepath.Join(r.tmp, "release")
	if err := os.Mkdir(r.dir, 0o755); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{r.buildBinaries, r.packBinaries, r.packChart, r.describeModules, r.buildImage, r.writeNotes, r.writeSums} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(r.out); err != nil {
		return err
	}
	if err := os.Rename(r.dir, r.out); err != nil {
		return err
	}
	fmt.Fprintf(r.log, "%s is in %s; docs/deploy/release.md says how to publish it\n", r.version, r.out)
	return nil
}

// name returns the file name of an artefact without its extension.
func (r *release) name(p platform) string {
	return "outbox-relay-" + r.version + "-" + p.os + "-" + p.arch
}

// writeNotes writes what a release page shows: the section of CHANGELOG.md, and from what the files were built.
func (r *release) writeNotes(context.Context) error {
	text := fmt.Sprintf("%s\n\nBuilt by %s from commit %s with `SOURCE_DATE_EPOCH=%d`; the same commit, Go and time give the same bytes. "+
		"`sha256sum --check SHA256SUMS` compares the files, `docs/deploy/release.md` says what each one is, and the digest of the image is `%s`.\n",
		r.notes, runtime.Version(), r.commit, r.time.Unix(), r.image)
	return r.write("RELEASE_NOTES.md", []byte(text))
}

// writeSums writes the checksums of all files, in the format of sha256sum.
func (r *release) writeSums(context.Context) error {
	entries, err := os.ReadDir(r.dir) // sorted
	if err != nil {
		return err
	}
	var sums strings.Builder
	for _, entry := range entries {
		content, err := os.ReadFile(filepath.Join(r.dir, entry.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(content), entry.Name())
	}
	return r.write("SHA256SUMS", []byte(sums.String()))
}

func (r *release) write(name string, content []byte) error {
	fmt.Fprintf(r.log, "%s: %d KiB\n", name, (len(content)+1023)/1024)
	return os.WriteFile(filepath.Join(r.dir, name), content, 0o644)
}

// parseEpoch reads SOURCE_DATE_EPOCH, or the time that git prints.
func parseEpoch(text string) (time.Time, error) {
	seconds, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil || seconds < 0 {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH %q is no number of seconds since 1970", text)
	}
	return time.Unix(seconds, 0).UTC(), nil
}
