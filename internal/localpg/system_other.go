//go:build !unix

package localpg

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
)

// Where there is no /bin/sh no server starts: tests compile there, and say so when they run.

type account = *struct{}

func unprivileged() account { return nil }

func runAs(*exec.Cmd, account, bool) {}

func belongsTo(fs.FileInfo, account) bool { return false }

func lockFile(*os.File) error { return errors.ErrUnsupported }

func freeBytes(string) uint64 { return 0 }
