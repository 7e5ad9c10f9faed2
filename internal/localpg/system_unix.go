//go:build unix

package localpg

import (
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"syscall"
)

// An account is that of another user; nil: that of this process.
type account = *syscall.Credential

// unprivileged returns the account to run PostgreSQL as, or nil for that of
// this process, which will do unless it is root.
func unprivileged() account {
	if os.Geteuid() != 0 {
		return nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.ParseUint(u.Uid, 10, 32)
		gid, gidErr := strconv.ParseUint(u.Gid, 10, 32)
		if uidErr == nil && gidErr == nil {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		}
	}
	return &syscall.Credential{Uid: 65534, Gid: 65534}
}

// runAs makes cmd run as the account. In its own session no signal of the terminal reaches it.
func runAs(cmd *exec.Cmd, as account, ownSession bool) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Credential, cmd.SysProcAttr.Setsid = as, ownSession
}

// belongsTo reports whether a file is the account's.
func belongsTo(info fs.FileInfo, as account) bool {
	uid := uint32(os.Geteuid())
	if as != nil {
		uid = as.Uid
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && stat.Uid == uid
}

// lockFile locks f, without waiting, for as long as it is open.
func lockFile(f *os.File) error {
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
}

// freeBytes returns how much a file system has left; 0: it is not there.
func freeBytes(dir string) uint64 {
	var fs syscall.Statfs_t
	if syscall.Statfs(dir, &fs) != nil {
		return 0
	}
	return uint64(fs.Bavail) * uint64(fs.Bsize) //nolint:unconvert // on some systems it is signed
}
