package localpg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// binDirs are where distributions put the server's binaries without putting
// them on PATH, in the order they are tried. A * stands for a version.
var binDirs = []string{
	"/usr/lib/postgresql/*/bin",                               // Debian, Ubuntu
	"/usr/pgsql-*/bin",                                        // Fedora, RHEL
	"/usr/libexec/postgresql*",                                // Alpine
	"/opt/homebrew/opt/postgresql@*/bin",                      // Homebrew on Apple silicon
	"/usr/local/opt/postgresql@*/bin",                         // Homebrew on Intel
	"/home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",         // Homebrew on Linux
	"/Applications/Postgres.app/Contents/Versions/[0-9]*/bin", // Postgres.app
}

// BinDirVariable is the environment variable that names the directory of initdb and postgres. With
// it the tests of one machine run on any version of PostgreSQL. A relative path counts from the
// directory of the process.
const BinDirVariable = "LOCALPG_BINDIR"

// DataVariable is the environment variable that names the data of a cluster with the migrated
// templates of package pgtest. The servers that the packages share among their tests are copies of
// it, which takes a tenth of initdb's time.
const DataVariable = "LOCALPG_DATA"

// findBinDir returns the directory that holds initdb and postgres: dir or
// [BinDirVariable] if either is not empty, otherwise the first of PATH, pg_config and patterns.
func findBinDir(ctx context.Context, dir string, patterns []string) (string, error) {
	if dir = cmp.Or(dir, os.Getenv(BinDirVariable)); dir != "" {
		if !hasServer(dir) {
			return "", fmt.Errorf("find PostgreSQL: no initdb and postgres in %s", dir)
		}
		return filepath.Abs(dir)
	}
	if path, err := exec.LookPath("initdb"); err == nil {
		// Often a link, into a directory that has the other programs too.
		if path, err := filepath.EvalSymlinks(path); err == nil && hasServer(filepath.Dir(path)) {
			return filepath.Dir(path), nil
		}
	}
	// pg_config comes with the client libraries: it names the directory even
	// where no server was installed into it.
	if out, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output(); err == nil {
		if dir := strings.TrimSpace(string(out)); hasServer(dir) {
			return dir, nil
		}
	}
	for _, pattern := range patterns {
		found, _ := filepath.Glob(pattern) // fails only on a malformed pattern
		slices.SortFunc(found, newestFirst)
		for _, dir := range found {
			if hasServer(dir) {
				return dir, nil
			}
		}
	}
	return "", errors.New("find PostgreSQL: initdb and postgres are neither on PATH nor in any usual place; " +
		"install it with `apt-get install postgresql` or `brew install postgresql@16`")
}

func hasServer(dir string) bool {
	for _, name := range []string{"initdb", "postgres"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			return false
		}
	}
	return true
}

var digits = regexp.MustCompile(`\d+`)

// newestFirst orders directories by the PostgreSQL version in their names, as
// numbers: 16 before 9.6.
func newestFirst(a, b string) int {
	return slices.Compare(numbers(b), numbers(a))
}

func numbers(dir string) (ns []int) {
	for _, s := range digits.FindAllString(dir, -1) {
		n, _ := strconv.Atoi(s) // fails only on absurd lengths, then with the largest int
		ns = append(ns, n)
	}
	return ns
}
