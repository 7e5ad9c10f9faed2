package settings

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// A file that changes is read again; one that cannot be used leaves what was, and is logged once.
func TestWatchedFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	name := filepath.Join(dir, "token")
	var out bytes.Buffer
	log := zerolog.New(&out)
	write := func(name, text string) {
		t.Helper()
		testkit.Must(t, os.WriteFile(name, []byte(text), 0o600))
	}
	logged := func(t *testing.T, want string) {
		t.Helper()
		if got := strings.Count(out.String(), "\n"); (want == "") != (got == 0) || !strings.Contains(out.String(), want) || got > 1 {
			t.Errorf("logged %q, want %q once", out.String(), want)
		}
		out.Reset()
	}
	write(name, "one")
	old := time.Now().Add(-time.Hour)
	age := func(name string) {
		testkit.Must(t, os.Chtimes(name, old, old))
	}
	age(name)
	reads := 0
	w, err := WatchFiles(&log, 10, func(contents [][]byte) (string, error) {
		reads++
		if problem := string(contents[0]); strings.HasPrefix(problem, "!") {
			return "", os.ErrInvalid
		}
		return string(contents[0]), nil
	}, name)
	testkit.Must(t, err)
	is := func(t *testing.T, want string) {
		t.Helper()
		for range 3 {
			testkit.Equal(t, "holds", w.Get(), want)
		}
	}
	is(t, "one")
	if reads != 1 {
		t.Errorf("an unchanged file was read %d times", reads)
	}
	logged(t, "")

	write(name, "two, longer")
	is(t, "one")
	logged(t, "larger than")
	write(name, "two")
	is(t, "two")
	logged(t, "in use")
	// Read when it was half written, and the rest carries the same time.
	soon := time.Now().Add(time.Minute)
	for _, text := range []string{"ten", "six"} {
		write(name, text)
		testkit.Must(t, os.Chtimes(name, soon, soon))
		is(t, text)
		logged(t, "in use")
	}
	write(name, "!bad")
	is(t, "six")
	logged(t, "stays in use")
	testkit.Must(t, os.Remove(name))
	is(t, "six")
	logged(t, "no such file")

	// As Kubernetes swaps a secret: the link changes, and the new file may be as long and as old as
	// the former.
	for _, version := range []string{"v1", "v2"} {
		write(filepath.Join(dir, version), version)
		age(filepath.Join(dir, version))
	}
	link := func(to string) {
		t.Helper()
		testkit.Must(t, os.Symlink(filepath.Join(dir, to), name+".new"))
		testkit.Must(t, os.Rename(name+".new", name))
	}
	link("v1")
	is(t, "v1")
	logged(t, "in use")
	link("v2")
	is(t, "v2")
	logged(t, "in use")
}
