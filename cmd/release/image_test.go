package main

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// openLayout unpacks the image, with one blob changed if wanted, and returns the index of its platforms.
func openLayout(t *testing.T, r *release, change func(name, content string) string) (v1.ImageIndex, map[string]string) {
	t.Helper()
	blobs, _ := unpack(t, strings.NewReader(read(t, filepath.Join(r.out, "outbox-relay-"+version+"-image.oci.tar"))))
	dir := t.TempDir()
	for name, content := range blobs {
		if strings.HasSuffix(name, "/") {
			continue
		}
		if change != nil {
			content = change(name, content)
		}
		write(t, filepath.Join(dir, name), content)
	}
	top, err := layout.ImageIndexFromPath(dir)
	must(t, err)
	manifest, err := top.IndexManifest()
	must(t, err)
	if len(manifest.Manifests) != 1 || manifest.Manifests[0].Annotations["org.opencontainers.image.ref.name"] != version || manifest.Manifests[0].MediaType != types.OCIImageIndex {
		t.Fatalf("the layout holds %+v, want one index named %s", manifest.Manifests, version)
	}
	index, err := top.ImageIndex(manifest.Manifests[0].Digest)
	must(t, err)
	return index, blobs
}

// testImage reads the image back by another way than it was written, and runs what is inside.
func testImage(t *testing.T, r *release) {
	index, blobs := openLayout(t, r, nil)
	must(t, validate.Index(index))
	of, err := index.Digest()
	must(t, err)
	if !strings.Contains(read(t, filepath.Join(r.out, "RELEASE_NOTES.md")), "the digest of the image is `"+of.String()+"`") {
		t.Errorf("the notes lack the digest %s", of)
	}
	for name, content := range blobs {
		if path.Dir(name) == "blobs/sha256" && !strings.HasSuffix(name, "/") && path.Base(name) != digest(content) {
			t.Errorf("the digest of %s is %s", name, digest(content))
		}
	}
	manifest, err := index.IndexManifest()
	must(t, err)
	var found []platform
	for _, m := range manifest.Manifests {
		found = append(found, platform{m.Platform.OS, m.Platform.Architecture})
		if m.ArtifactType != "" {
			t.Errorf("the index says that %s is an artifact, %s", m.Platform, m.ArtifactType)
		}
		image, err := index.Image(m.Digest)
		must(t, err)
		testImageOf(t, r, found[len(found)-1], image)
	}
	if !slices.Equal(found, r.imagePlatforms()) {
		t.Errorf("the image is for %v", found)
	}
	if manifest.Annotations["org.opencontainers.image.version"] != version || manifest.Annotations["org.opencontainers.image.revision"] != r.commit {
		t.Errorf("the annotations are %v", manifest.Annotations)
	}
	damaged, _ := openLayout(t, r, func(name, content string) string {
		if len(content) > 1<<20 { // the layer of a binary
			return content[:1000] + "x" + content[1001:]
		}
		return content
	})
	if err := validate.Index(damaged); err == nil {
		t.Error("a damaged layer is not found")
	}
}

func testImageOf(t *testing.T, r *release, p platform, image v1.Image) {
	t.Helper()
	config, err := image.ConfigFile()
	must(t, err)
	if config.OS != p.os || config.Architecture != p.arch || config.Created.Time.Unix() != r.time.Unix() || config.Config.Labels["org.opencontainers.image.version"] != version {
		t.Errorf("%s: the configuration is of %s/%s, %v, with %v", p, config.OS, config.Architecture, config.Created, config.Config.Labels)
	}
	files := imageFiles(t, image)
	var names []string
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	if want := []string{"etc/", "etc/ssl/", "etc/ssl/certs/", "etc/ssl/certs/ca-certificates.crt", "outbox-relay"}; !slices.Equal(names, want) {
		t.Errorf("%s holds %q, want %q", p, names, want)
	}
	if pool := x509.NewCertPool(); !pool.AppendCertsFromPEM([]byte(files["etc/ssl/certs/ca-certificates.crt"])) || strings.Count(files["etc/ssl/certs/ca-certificates.crt"], "BEGIN") < 100 {
		t.Errorf("%s trusts no authorities", p)
	}
	archived, _ := unpackGzip(t, filepath.Join(r.out, r.name(p)+".tar.gz"))
	if files["outbox-relay"] != archived[r.name(p)+"/outbox-relay"] {
		t.Errorf("%s: image and archive have two binaries", p)
	}
	if p == host {
		runVersion(t, r, files["outbox-relay"])
	}
}

// imageFiles returns the files of all layers.
func imageFiles(t *testing.T, image v1.Image) map[string]string {
	t.Helper()
	all := map[string]string{}
	layers, err := image.Layers()
	must(t, err)
	for _, layer := range layers {
		content, err := layer.Uncompressed()
		must(t, err)
		texts, modes := unpack(t, content)
		for name, text := range texts {
			all[name] = text
			if (modes[name].Perm() == 0o755) != (name == "outbox-relay" || strings.HasSuffix(name, "/")) {
				t.Errorf("%s has mode %v", name, modes[name])
			}
		}
	}
	return all
}

// testDockerfile compares the image with what the Dockerfile says: the commands of its build give the same bytes, and its last stage
// copies the same files and starts the same program.
func testDockerfile(t *testing.T, r *release) {
	index, _ := openLayout(t, r, nil)
	manifest, err := index.IndexManifest()
	must(t, err)
	image, err := index.Image(manifest.Manifests[0].Digest)
	must(t, err)
	files := imageFiles(t, image)
	stages := strings.Split(read(t, filepath.Join(r.root, "Dockerfile")), "\nFROM ")
	out := t.TempDir()
	for line := range strings.Lines(stages[1]) {
		command, isRun := strings.CutPrefix(line, "RUN ")
		if !isRun || strings.Contains(command, "./cmd/demo") || strings.Contains(command, "mod download") {
			continue
		}
		p := r.imagePlatforms()[0]
		env := []string{"CGO_ENABLED=0", "GOOS=" + p.os, "GOARCH=" + p.arch, "VERSION=" + version, "COMMIT=" + r.commit}
		execute(t, r.root, env, "sh", "-c", strings.ReplaceAll(command, "/out/", out+"/"))
	}
	config, err := image.ConfigFile()
	must(t, err)
	got := dockerConfig(t, stages[len(stages)-1])
	if want := config.Config; !slices.Equal(got.Entrypoint, want.Entrypoint) || !slices.Equal(got.Cmd, want.Cmd) || got.User != want.User ||
		!slices.Equal(got.Healthcheck.Test, want.Healthcheck.Test) || got.Healthcheck.Interval != want.Healthcheck.Interval ||
		got.Healthcheck.Timeout != want.Healthcheck.Timeout || got.Healthcheck.StartPeriod != want.Healthcheck.StartPeriod {
		t.Errorf("the image has %+v %+v, the Dockerfile %+v %+v", want, want.Healthcheck, got, got.Healthcheck)
	}
	copied := 0
	for line := range strings.Lines(stages[len(stages)-1]) {
		words := strings.Fields(line)
		if len(words) == 0 || words[0] != "COPY" {
			continue
		}
		from, to := words[len(words)-2], words[len(words)-1]
		if strings.HasSuffix(to, "/") {
			to += path.Base(from)
		}
		built, err := os.ReadFile(strings.Replace(from, "/out/", out+"/", 1))
		must(t, err)
		if copied++; files[to[1:]] == "" || !bytes.Equal(built, []byte(files[to[1:]])) {
			t.Errorf("%s: the Dockerfile has %d bytes, the image %d, and they differ", to, len(built), len(files[to[1:]]))
		}
	}
	if copied != 2 {
		t.Errorf("the Dockerfile copies %d files, the image has 2", copied)
	}
}

// dockerConfig reads how a stage of a Dockerfile starts its program.
func dockerConfig(t *testing.T, stage string) v1.Config {
	t.Helper()
	config := v1.Config{Healthcheck: &v1.HealthConfig{}}
	list := func(text string) (words []string) {
		must(t, json.Unmarshal([]byte(text), &words))
		return words
	}
	for line := range strings.Lines(stage) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch name {
		case "USER":
			config.User = rest
		case "ENTRYPOINT":
			config.Entrypoint = list(rest)
		case "CMD":
			config.Cmd = list(rest)
		case "HEALTHCHECK":
			flags, command, _ := strings.Cut(rest, " CMD ")
			config.Healthcheck.Test = append([]string{"CMD"}, list(command)...)
			for flag := range strings.FieldsSeq(flags) {
				name, value, _ := strings.Cut(flag, "=")
				field := map[string]*time.Duration{
					"--interval": &config.Healthcheck.Interval, "--timeout": &config.Healthcheck.Timeout, "--start-period": &config.Healthcheck.StartPeriod,
				}[name]
				duration, err := time.ParseDuration(value)
				must(t, err)
				*field = duration
			}
		}
	}
	return config
}
