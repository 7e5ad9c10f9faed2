package localpg

import (
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"syscall"
)

// unprivileged returns the account to run PostgreSQL as, or nil for that of
// this process, which will do unless it is root.
func unprivileged() *syscall.Credential {
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

// DropPrivileges makes cmd, before it is started, run as the account the server
// runs as, as PostgreSQL's own programs demand. It changes nothing unless this
// process is root's. An empty cmd.Dir becomes the server's directory, since
// the account may not be able to enter the current one.
func (s *Server) DropPrivileges(cmd *exec.Cmd) {
	if s.account == nil {
		return
	}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Credential = s.account
	if cmd.Dir == "" {
		cmd.Dir = s.dir
	}
}
