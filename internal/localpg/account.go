package localpg

import "os/exec"

// DropPrivileges makes cmd, before it is started, run as the account the server
// runs as, as PostgreSQL's own programs demand. It changes nothing unless this
// process is root's. An empty cmd.Dir becomes the server's directory, since
// the account may not be able to enter the current one.
func (s *Server) DropPrivileges(cmd *exec.Cmd) {
	if s.account == nil {
		return
	}
	runAs(cmd, s.account, false)
	if cmd.Dir == "" {
		cmd.Dir = s.dir
	}
}
