package migrations

import (
	"embed"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// A Set names one of the two independent series of migrations.
type Set string

const (
	// Outbox is what a producer's database needs.
	Outbox Set = "outbox"
	// Inbox is what a receiver's database needs.
	Inbox Set = "inbox"
)

//go:embed outbox/*.sql inbox/*.sql
var files embed.FS

// FS returns the set's SQL files. It panics on a set that is not one of the constants.
func (s Set) FS() fs.FS {
	sub, err := fs.Sub(files, string(s))
	if err == nil {
		_, err = fs.Stat(sub, ".")
	}
	if err != nil {
		panic(fmt.Sprintf("migrations: unknown set %q", string(s)))
	}
	return sub
}

// VersionTable returns the table in which goose records the set's applied versions. Each set has
// its own, so that both can live in one schema, beside an application's own goose migrations.
func (s Set) VersionTable() string {
	return string(s) + "_schema_version"
}

// Latest returns the newest version of the set that this build knows.
func (s Set) Latest() int64 { return slices.Max(s.Versions()) }

// Versions returns all of them.
func (s Set) Versions() (all []int64) {
	names, err := fs.Glob(s.FS(), "*.sql")
	if err != nil {
		panic(fmt.Sprintf("migrations: list %q: %v", string(s), err))
	}
	for _, name := range names {
		number, _, _ := strings.Cut(path.Base(name), "_")
		version, err := strconv.ParseInt(number, 10, 64)
		if err != nil {
			panic(fmt.Sprintf("migrations: file %s does not start with a version", name))
		}
		all = append(all, version)
	}
	return all
}
