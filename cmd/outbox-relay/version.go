package main

import (
	"cmp"
	"fmt"
	"io"
	"runtime/debug"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/output"
	"github.com/outbox-relay/outbox-relay/migrations"
)

// version and commit are set by the linker (-X main.version=v1.2.3 -X main.commit=…) and never
// written to.
var version, commit string

type versionCmd struct {
	JSON bool `help:"Print JSON."`
}

// build says what this program was built from.
type build struct {
	Version string `json:"version"` // "devel" if the build did not say
	Commit  string `json:"commit"`  // empty if neither the linker nor git said
	Go      string `json:"go"`
	// Schemas holds the newest version of each set of migrations.
	Schemas map[migrations.Set]int64 `json:"schemas"`
}

func buildInfo() build {
	b := build{Version: cmp.Or(version, "devel"), Commit: commit, Schemas: map[migrations.Set]int64{
		migrations.Outbox: migrations.Outbox.Latest(),
		migrations.Inbox:  migrations.Inbox.Latest(),
	}}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	b.Go = info.GoVersion
	if v := info.Main.Version; version == "" && v != "" && v != "(devel)" {
		b.Version = v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			b.Commit = s.Value
		}
	}
	return b
}

func (cmd versionCmd) Run(inv *cli.Invocation) error {
	b := buildInfo()
	return output.Show(inv.Stdout, cmd.JSON, b, printVersion)
}

func printVersion(w io.Writer, b build) error {
	text := "outbox-relay " + b.Version
	if b.Commit != "" {
		text += " (commit " + b.Commit[:min(12, len(b.Commit))] + ")"
	}
	_, err := fmt.Fprintf(w, "%s, %s, outbox schema %d, inbox schema %d\n",
		text, b.Go, b.Schemas[migrations.Outbox], b.Schemas[migrations.Inbox])
	return err
}
