package chaos

import (
	encoding "encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// movedClock makes a program's clock as many seconds fast as a file says.
const movedClock = `
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long long *fast;
__attribute__((constructor)) static void find(void) {
	int file = open(getenv("MOVED_CLOCK"), O_RDONLY);
	void *at = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
	if (at != MAP_FAILED) fast = at;
}
int clock_gettime(clockid_t id, struct timespec *t) {
	int r = syscall(SYS_clock_gettime, id, t);
	if (id == CLOCK_REALTIME && fast) t->tv_sec += *fast;
	return r;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
	int r = syscall(SYS_gettimeofday, t, zone);
	if (fast) t->tv_sec += *fast;
	return r;
}
time_t time(time_t *t) {
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	if (t) *t = now.tv_sec;
	return now.tv_sec;
}`

// The clock of the database's machine goes forward by an hour, back, behind by an hour, and back: what was put off by the fast clock waits
// until that time comes, and nothing else happens to it.
func TestClockOfTheDatabaseJumps(t *testing.T) {
	testsize.Long(t)
	dir, err := os.MkdirTemp("", "outbox-relay-clock-")
	testkit.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	testkit.Must(t, os.Chmod(dir, 0o755)) // the server has another account
	source, library, file := filepath.Join(dir, "clock.c"), filepath.Join(dir, "clock.so"), filepath.Join(dir, "fast")
	testkit.Must(t, os.WriteFile(source, []byte(movedClock), 0o600))
	if out, err := exec.Command("cc", "-shared", "-fPIC", "-o", library, source).CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	shared, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o644)
	testkit.Must(t, err)
	defer shared.Close()
	move := func(by time.Duration) {
		_, err := shared.WriteAt(encoding.NativeEndian.AppendUint64(nil, uint64(by/time.Second)), 0)
		testkit.Must(t, err)
	}
	move(0)
	s := newStage(t, 1, 2, "LD_PRELOAD="+library, "MOVED_CLOCK="+file)
	s.making, s.clockMoves = "clock set", true
	s.wire.share.Store(10)
	ended := s.produceMeanwhile(200, 0)
	for _, fast := range []time.Duration{time.Hour, 0, -time.Hour, 0} {
		<-time.After(2 * time.Second)
		over := s.fault("")
		move(fast)
		<-time.After(time.Second) // until what was read by the old clock is written
		over()
	}
	ended()
	over := s.fault("")
	move(time.Hour) // what was put off while it was fast is due at last
	s.drained()
	over()
	move(0)
	t.Log(s.judge())
}
