package main

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// notices returns the licences of what the binaries hold: the standard library, modules, and scripts of the page.
func (r *release) notices(ctx context.Context) ([]byte, error) {
	goroot, err := r.output(ctx, nil, "go", "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	if err := addNotices(&text, "Go", strings.TrimSpace(string(goroot)), isNotice); err != nil {
		return nil, err
	}
	modules, err := r.modules()
	if err != nil {
		return nil, err
	}
	dirs, err := r.output(ctx, nil, "go", append([]string{"list", "-m", "-f", "{{.Path}}\t{{.Dir}}"}, modules...)...)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(dirs)) {
		path, dir, _ := strings.Cut(strings.TrimSpace(line), "\t")
		if err := addNotices(&text, path, dir, isNotice); err != nil {
			return nil, err
		}
	}
	scripts := filepath.Join(r.root, "internal/admin/page/static/vendor")
	err = addNotices(&text, "Scripts of the page", scripts, func(name string) bool { return strings.HasSuffix(name, ".LICENSE") })
	return text.Bytes(), err
}

// modules returns the paths of the modules in any of the binaries.
func (r *release) modules() (paths []string, err error) {
	for _, p := range r.platforms {
		info, err := buildinfo.ReadFile(r.built[p])
		if err != nil {
			return nil, err
		}
		for _, m := range info.Deps {
			paths = append(paths, m.Path)
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths), nil
}

// addNotices appends the files of a directory that are notices. A directory without one is an error: it must not be forgotten.
func addNotices(text *bytes.Buffer, title, dir string, chosen func(name string) bool) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("look for the licence of %s: %w", title, err)
	}
	found := 0
	for _, entry := range entries {
		if entry.IsDir() || !chosen(entry.Name()) {
			continue
		}
		content, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if err != nil {
			return err
		}
		found++
		line := strings.Repeat("=", 80)
		fmt.Fprintf(text, "%s\n%s: %s\n%s\n\n%s\n\n", line, title, entry.Name(), line, bytes.TrimSpace(content))
	}
	if found == 0 {
		return fmt.Errorf("%s has no licence in %s", title, dir)
	}
	return nil
}
