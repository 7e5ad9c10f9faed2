package localpg

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// settleTime is how long a directory must have been left alone before it counts
// as abandoned: longer than the moment between a janitor making it and its
// owner locking it, and than a janitor needs to remove it.
const settleTime = time.Minute

// lockDir locks dir for as long as the returned file is open: until its owner
// closes it or dies, since no child inherits it.
func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("lock directory: %w", err)
	}
	if err := lockFile(f); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock directory %s: %w", dir, err)
	}
	return f, nil
}

// sweep removes what servers of the same account left behind whose owner and
// janitor are both gone. It is best effort: what it cannot prove abandoned or
// cannot remove stays.
func sweep(ctx context.Context, binDir string, as account) {
	dirs, _ := filepath.Glob(prefix + "*") // fails only on a malformed pattern
	inMemory, _ := filepath.Glob(memoryPrefix + "*")
	for _, dir := range append(dirs, inMemory...) {
		info, err := os.Lstat(dir)
		if err != nil || !info.IsDir() || time.Since(info.ModTime()) < settleTime || !belongsTo(info, as) {
			continue
		}
		lock, err := lockDir(dir)
		if err != nil {
			continue
		}
		_ = reap(ctx, dir, binDir, as)
		lock.Close()
	}
}

// reap stops the PostgreSQL that may still run in dir without a janitor, and
// removes dir.
func reap(ctx context.Context, dir, binDir string, as account) error {
	// After a reboot the pid in postmaster.pid may be anybody's. Only when
	// something answers on the socket does the file tell the truth.
	if answers(dir) {
		cmd := exec.CommandContext(ctx, filepath.Join(binDir, "pg_ctl"), "stop", "-D", filepath.Join(dir, "data"), "-m", "immediate")
		cmd.Dir = "/"
		runAs(cmd, as, false)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("stop orphaned PostgreSQL: %w: %s", err, out)
		}
	}
	return os.RemoveAll(dir)
}

// answers reports whether a process listens on a PostgreSQL socket in dir.
func answers(dir string) bool {
	sockets, _ := filepath.Glob(filepath.Join(dir, ".s.PGSQL.*[0-9]")) // not its lock file
	for _, socket := range sockets {
		if conn, err := net.Dial("unix", socket); err == nil {
			conn.Close()
			return true
		}
	}
	return false
}
