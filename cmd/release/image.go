package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// repository is where the source is, as the annotations of the image say.
const repository = "https://github.com/outbox-relay/outbox-relay"

// imageConfig returns how the relay starts in the image: what the last stage of the Dockerfile says. A test compares the two.
func imageConfig() v1.Config {
	return v1.Config{
		User: "65532:65532", WorkingDir: "/", Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		Entrypoint: []string{"/outbox-relay"}, Cmd: []string{"run"},
		Healthcheck: &v1.HealthConfig{
			Test: []string{"CMD", "/outbox-relay", "status", "--healthcheck"}, Interval: 10 * time.Second, Timeout: 6 * time.Second, StartPeriod: 15 * time.Second,
		},
	}
}

// imagePlatforms returns the platforms that the image is for.
func (r *release) imagePlatforms() []platform {
	return slices.DeleteFunc(slices.Clone(r.platforms), func(p platform) bool { return p.os != "linux" })
}

// buildImage writes the image of all platforms as an archive of an OCI layout, which crane and skopeo copy into registries.
func (r *release) buildImage(ctx context.Context) error {
	roots, err := r.output(ctx, nil, "go", "run", "-C", "cmd/release", "./roots")
	if err != nil {
		return err
	}
	dir := filepath.Join(r.tmp, "image")
	store, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	// mutate.AppendManifests would set artifactType for every platform, as if it were no image. skopeo 1.9 drops this field, and then
	// the digest in the registry is not the one of the notes.
	index := v1.IndexManifest{SchemaVersion: 2, MediaType: types.OCIImageIndex, Annotations: r.annotations()}
	for _, p := range r.imagePlatforms() {
		image, err := r.imageOf(p, roots)
		if err != nil {
			return fmt.Errorf("make the image of %s: %w", p, err)
		}
		if err := store.WriteImage(image); err != nil {
			return err
		}
		manifest, err := image.RawManifest()
		if err != nil {
			return err
		}
		descriptor, err := describe(manifest, types.OCIManifestSchema1)
		if err != nil {
			return err
		}
		descriptor.Platform = &v1.Platform{OS: p.os, Architecture: p.arch}
		index.Manifests = append(index.Manifests, descriptor)
	}
	content, err := json.Marshal(index)
	if err != nil {
		return err
	}
	descriptor, err := describe(content, types.OCIImageIndex)
	if err != nil {
		return err
	}
	if err := store.WriteBlob(descriptor.Digest, io.NopCloser(bytes.NewReader(content))); err != nil {
		return err
	}
	descriptor.Annotations = map[string]string{"org.opencontainers.image.ref.name": r.version}
	if err := store.AppendDescriptor(descriptor); err != nil {
		return err
	}
	r.image = descriptor.Digest.String()
	return r.packImage(dir)
}

// describe returns how an index refers to a manifest.
func describe(manifest []byte, kind types.MediaType) (v1.Descriptor, error) {
	digest, size, err := v1.SHA256(bytes.NewReader(manifest))
	return v1.Descriptor{MediaType: kind, Size: size, Digest: digest}, err
}

// packImage writes the archive of a layout.
func (r *release) packImage(dir string) error {
	files, err := filesBelow(dir)
	if err != nil {
		return err
	}
	archive, err := archiveOf(files, r.time)
	if err != nil {
		return err
	}
	return r.write("outbox-relay-"+r.version+"-image.oci.tar", archive)
}

// imageOf returns the image of one platform: the authorities that the relay trusts, and the relay. There is no shell and nothing else.
func (r *release) imageOf(p platform, roots []byte) (v1.Image, error) {
	binary, err := os.ReadFile(r.built[p])
	if err != nil {
		return nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, f := range []file{{name: "etc/ssl/certs/ca-certificates.crt", content: roots}, {name: "outbox-relay", content: binary, program: true}} {
		content, err := archiveOf([]file{f}, r.time)
		if err != nil {
			return nil, err
		}
		open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil }
		layer, err := tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
		if err != nil {
			return nil, err
		}
		image, err = mutate.Append(image, mutate.Addendum{Layer: layer, History: v1.History{Created: v1.Time{Time: r.time}, CreatedBy: "COPY /" + f.name}})
		if err != nil {
			return nil, err
		}
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created, config.Config = p.os, p.arch, v1.Time{Time: r.time}, imageConfig()
	config.Config.Labels = r.annotations()
	if image, err = mutate.ConfigFile(image, config); err != nil {
		return nil, err
	}
	return mutate.Annotations(image, r.annotations()).(v1.Image), nil
}

// annotations returns what registries show about the image.
func (r *release) annotations() map[string]string {
	const prefix = "org.opencontainers.image."
	return map[string]string{
		prefix + "title": "outbox-relay", prefix + "description": "Delivers the events that a service commits to its outbox table",
		prefix + "version": r.version, prefix + "revision": r.commit, prefix + "created": r.time.Format(time.RFC3339),
		prefix + "source": repository, prefix + "licenses": "MIT",
	}
}

// filesBelow returns the files of a directory, by their names in it.
func filesBelow(dir string) (files []file, err error) {
	tree := os.DirFS(dir)
	err = fs.WalkDir(tree, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(tree, name)
		files = append(files, file{name: name, content: content})
		return err
	})
	return files, err
}
