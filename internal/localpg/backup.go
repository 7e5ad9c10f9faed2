package localpg

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/url"
	"os/exec"
	"path/filepath"
	"strings"
)

// BaseBackup copies the data of the running server with pg_basebackup and returns the directory,
// for [Options.CopyOf]. With standby the copy follows this server until it is promoted; without, it
// starts as its own server. The directory goes with this server.
func (s *Server) BaseBackup(ctx context.Context, standby bool) (dir string, err error) {
	dir = filepath.Join(s.dir, "backup-"+strings.ToLower(rand.Text()[:10]))
	u, err := url.Parse(s.DSN(""))
	if err != nil {
		return "", fmt.Errorf("back up PostgreSQL: %w", err)
	}
	query := u.Query()
	args := []string{"-D", dir, "-h", query.Get("host"), "-p", query.Get("port"), "-U", u.User.Username(), "-c", "fast", "-N", "-X", "stream"}
	if standby {
		args = append(args, "-R")
	}
	cmd := exec.CommandContext(ctx, filepath.Join(s.binDir, "pg_basebackup"), args...)
	s.DropPrivileges(cmd)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("back up PostgreSQL: %w\n%s", err, out)
	}
	return dir, nil
}
