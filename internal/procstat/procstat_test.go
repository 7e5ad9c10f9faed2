package procstat

import (
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

// Times grow while this process works, and a process that does not exist has none.
func TestTimes(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux has this /proc")
	}
	begun := time.Now()
	for Process(os.Getpid()) == 0 {
		if time.Since(begun) > time.Minute {
			t.Fatal("this process has used no time")
		}
	}
	if own, family := Process(os.Getpid()), Family(os.Getpid()); family < own {
		t.Errorf("the family has used %s, less than its parent, %s", family, own)
	}
	busy, capacity := Machine()
	if busy <= 0 || busy > capacity {
		t.Errorf("the machine was busy for %s of %s", busy, capacity)
	}
	comm, err := os.ReadFile("/proc/self/comm")
	testkit.Must(t, err)
	testkit.Equal(t, "the parent", Parent(os.Getpid(), strings.TrimSpace(string(comm))), os.Getppid())
	testkit.Equal(t, "parent of another name", Parent(os.Getpid(), "another program"), 0)
	if Process(-1) != 0 || Family(-1) != 0 || Parent(-1, "") != 0 {
		t.Error("a process that does not exist has used time")
	}
}
