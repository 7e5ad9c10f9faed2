package chaos

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// smallDisk is in the environment of the process that may change the size of /dev/shm, where the
// server's data is.
const smallDisk = "CHAOS_SMALL_DISK"

// While the disk of both databases is full, data and log, producers and relays fail, or the server
// crashes. When there is room again, everything that was committed is delivered.
func TestDiskIsFull(t *testing.T) {
	if os.Getenv(smallDisk) != "" {
		fillDisk(t)
		return
	}
	testsize.Long(t)
	_, err := binary()
	testkit.Must(t, err)
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestDiskIsFull$", "-test.v")
	child.Env = append(os.Environ(), smallDisk+"=yes")
	child.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL} // so that nobody else sees the small disk
	said, err := child.CombinedOutput()
	if errors.Is(err, syscall.EPERM) {
		t.Skip("only root may mount its own file system")
	}
	if err != nil {
		t.Errorf("%v\n%s", err, said)
	}
	t.Logf("%s", said)
}

func fillDisk(t *testing.T) {
	const disk = "/dev/shm"
	testkit.Must(t, syscall.Mount("none", disk, "tmpfs", 0, "size=5g"))
	s := newStage(t, 1, 2)
	s.making = "disk full"
	ended := s.produceMeanwhile(200, 0)
	for round := range 4 {
		<-time.After(time.Second)
		over := s.fault("", history.Undoes)
		err := error(syscall.EINVAL)
		for errors.Is(err, syscall.EINVAL) { // as long as more is written meanwhile
			var used syscall.Statfs_t
			testkit.Must(t, syscall.Statfs(disk, &used))
			err = resize(disk, int64(used.Blocks-used.Bfree)*used.Bsize)
		}
		testkit.Must(t, err)
		for full := time.Now(); time.Since(full) < 3*time.Second; <-time.After(100 * time.Millisecond) {
			if round%2 == 1 { // the server cannot do without another file of its log, and crashes
				_, _ = s.outbox.Exec(s.Ctx, `SELECT pg_switch_wal()`)
			}
		}
		testkit.Must(t, resize(disk, 5<<30))
		s.must(s.Server.Shutdown(s.Ctx)) // it may be down already, or start again and again
		s.must(s.Server.StartAgain(s.Ctx))
		s.databaseIsBack()
		over()
	}
	ended()
	s.drained()
	t.Log(s.judge())
	for _, what := range []string{"ERROR:  could not extend file", "PANIC:  could not"} {
		if log := s.Server.LogTail(20_000); !strings.Contains(log, what) {
			t.Errorf("the server does not say %q:\n%s", what, s.Server.LogTail(100))
		}
	}
}

func resize(disk string, bytes int64) error {
	return syscall.Mount("none", disk, "tmpfs", syscall.MS_REMOUNT, fmt.Sprintf("size=%d", bytes))
}
