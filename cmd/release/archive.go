package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"
)

var (
	chartVersion = regexp.MustCompile(`(?m)^version: .*$`)
	appVersion   = regexp.MustCompile(`(?m)^appVersion: .*$`)
)

// A file is one entry of an archive.
type file struct {
	name    string // with slashes
	content []byte
	program bool
}

// archiveOf returns a tar archive of files and their directories, in the order of their names. Owner, mode and time do not come from
// this machine, so that the same files give the same bytes.
func archiveOf(files []file, modified time.Time) ([]byte, error) {
	files = slices.Clone(files)
	slices.SortFunc(files, func(a, b file) int { return cmp.Compare(a.name, b.name) })
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	made := map[string]bool{}
	for _, f := range files {
		for i, c := range f.name {
			if dir := f.name[:i]; c == '/' && !made[dir] {
				made[dir] = true
				if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755, ModTime: modified}); err != nil {
					return nil, err
				}
			}
		}
		header := &tar.Header{Typeflag: tar.TypeReg, Name: f.name, Size: int64(len(f.content)), Mode: 0o644, ModTime: modified}
		if f.program {
			header.Mode = 0o755
		}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.content); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return out.Bytes(), err
}

// compress returns the content as gzip, without a name and a time.
func compress(content []byte) ([]byte, error) {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(content); err != nil {
		return nil, err
	}
	err := w.Close()
	return out.Bytes(), err
}

// isNotice reports whether a file at the top of a module holds a text that must accompany its binary.
func isNotice(name string) bool {
	upper := strings.ToUpper(name)
	return path.Ext(upper) != ".GO" && (strings.HasPrefix(upper, "LICENSE") || strings.HasPrefix(upper, "LICENCE") ||
		strings.HasPrefix(upper, "COPYING") || strings.HasPrefix(upper, "NOTICE"))
}
