//go:build unix

package localpg

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// age makes dir look as if it had been left alone for d.
func age(t *testing.T, dir string, d time.Duration) {
	t.Helper()
	then := time.Now().Add(-d)
	testkit.Must(t, os.Chtimes(dir, then, then))
}

// killJanitor ends the janitor as nothing but an administrator would.
func killJanitor(t *testing.T, s *Server) {
	t.Helper()
	testkit.Must(t, s.janitor.cmd.Process.Kill())
	s.janitor.cmd.Wait() // says that it was killed
}

func TestStopWithoutJanitor(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	killJanitor(t, s)
	if len(processes(t, s.Dir())) == 0 {
		t.Fatal("PostgreSQL died with its janitor: nothing is tested")
	}
	if err := s.Stop(); err != nil {
		t.Error(err)
	}
	wantNothingLeft(t, s.Dir())
}

// TestSweep is not parallel: it lets go of a running server's lock, which any
// other Start would take for permission to remove it.
func TestSweep(t *testing.T) {
	place := func(name string) string {
		dir := fmt.Sprint(prefix, "test-", name, os.Getpid())
		testkit.Must(t, os.MkdirAll(filepath.Join(dir, "data"), 0o700))
		t.Cleanup(func() { os.RemoveAll(dir) })
		if account := unprivileged(); account != nil {
			testkit.Must(t, os.Chown(dir, int(account.Uid), int(account.Gid)))
		}
		return dir
	}
	// Each is aged last: from then on, any other test process may sweep it up.
	abandoned, owned, young := place("abandoned"), place("owned"), place("young")
	lock, err := lockDir(owned)
	testkit.Must(t, err)
	defer lock.Close()
	age(t, owned, 2*settleTime)
	kept := []string{owned, young}
	if os.Geteuid() == 0 { // only root can make what another account owns
		foreign := place("foreign")
		testkit.Must(t, os.Chown(foreign, 1, 1))
		age(t, foreign, 2*settleTime)
		kept = append(kept, foreign)
	}
	// A pid file that survived a reboot may name any process: here this one, which must live.
	pid := fmt.Appendln(nil, os.Getpid())
	testkit.Must(t, os.WriteFile(filepath.Join(abandoned, "data", "postmaster.pid"), pid, 0o600))
	age(t, abandoned, 2*settleTime)
	orphan := start(t, Options{})
	killJanitor(t, orphan)
	orphan.lock.Close()
	age(t, orphan.Dir(), 2*settleTime)

	sweep(t.Context(), orphan.BinDir(), unprivileged())

	for _, dir := range kept {
		if !exists(dir) {
			t.Errorf("%s was removed", dir)
		}
	}
	// Waiting, because another test process may have been the one to sweep them up.
	wantNothingLeft(t, abandoned)
	wantNothingLeft(t, orphan.Dir())
}
