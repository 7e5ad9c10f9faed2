package chaos

import (
	"context"
	encoding "encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/process"
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

// The clock of the database's machine goes forward by an hour, back, behind by an hour, and back:
// what was put off by the fast clock waits until that time comes, and nothing else happens to it.
func TestClockOfTheDatabaseJumps(t *testing.T) {
	testsize.Long(t)
	s, move := newClockStage(t)
	ended := s.produceMeanwhile(200, 0)
	s.jump(move, time.Hour, 0, -time.Hour, 0)
	ended()
	over := s.fault("", history.Undoes)
	move(time.Hour) // what was put off while it was fast is due at last
	s.drained()
	over()
	move(0)
	t.Log(s.judge())
}

// The same by a year. What the fast clock put off waits for a year, and what was promised to the
// receiver by another clock fails, with an alert. An operator sends both, but for what a producer
// has put off itself. While the clock is a year ahead, nothing is removed by its age.
func TestClockOfTheDatabaseJumpsByAYear(t *testing.T) {
	testsize.Long(t)
	s, move := newClockStage(t)
	ended := s.produceMeanwhile(200, 0)
	s.jump(move, year)
	for _, command := range [][]string{{outboxName, "archive", "run", "--yes"}, {inboxName, "inbox", "prune", "--older-than", "720h", "--yes"}} {
		if err := s.operate(command[0], command[1:]...); err == nil || !strings.Contains(err.Error(), "nothing is removed by its age") {
			t.Errorf("%s: %v", command[1:], err)
		}
	}
	s.jump(move, 0, -year, 0)
	ended()
	s.until("the end of what is due", func(ctx context.Context) (bool, error) {
		return process.One[bool](ctx, s.outbox, `SELECT NOT EXISTS (SELECT FROM outbox_delivery WHERE status = 'pending' AND blocked_by IS NULL AND next_attempt_at <= now())`)
	})
	const undelivered = `
SELECT format('%s %s', count(*), what)
FROM (SELECT CASE WHEN status = 'failed' THEN 'failed: ' || last_reason WHEN blocked_by IS NOT NULL THEN 'behind others' ELSE 'due in a year' END AS what
      FROM outbox_delivery WHERE status <> 'delivered') d GROUP BY what`
	t.Logf("then are %q", all(s, s.outbox, undelivered, pgx.RowTo[string]))
	if alerted := all(s, s.outbox, `SELECT count(*) FROM outbox_alert WHERE rule = 'failed' AND resolved_at IS NULL`, pgx.RowTo[int])[0]; alerted != 1 {
		t.Error("no alert of what failed is open")
	}
	if reopened := all(s, s.outbox, `SELECT what FROM chaos_reopened`, pgx.RowTo[string]); len(reopened) > 0 {
		t.Errorf("before an operator came: %q", reopened)
	}
	over := s.fault("", history.Undoes)
	// Again and again: what waits behind the head of its ordering key is made due once that is
	// delivered, and fails then if it was promised before.
	s.must(s.Poll(drainPatience, "the backlog to drain", func(ctx context.Context) (bool, error) {
		err := errors.Join(s.operate(outboxName, "replay", "--destination", "default", "--force", "--yes"), s.operate(outboxName, "retry", "--destination", "default", "--yes"))
		if err != nil {
			return false, err
		}
		return process.One[bool](ctx, s.outbox, `
SELECT NOT EXISTS (SELECT FROM outbox_delivery WHERE status = 'failed')
   AND (SELECT count(*) FROM (`+selectOpen+`) o) = (
       SELECT count(*) FROM outbox_delivery d JOIN outbox o ON o.id = d.event_id
       WHERE d.status = 'pending' AND d.last_attempt_at IS NULL AND o.available_at > greatest(now(), o.created_at))`)
	}))
	move(year) // until what a producer wanted to be sent later, by that clock, is due
	s.drained()
	over()
	move(0)
	_, err := s.outbox.Exec(s.Ctx, `DELETE FROM chaos_reopened WHERE what LIKE '%failed > pending'`) // by the replay
	s.must(err)
	t.Log(s.judge())
}

// newClockStage opens a stage on a server whose clock the returned function sets.
func newClockStage(t *testing.T) (s *stage, move func(by time.Duration)) {
	t.Helper()
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
	t.Cleanup(func() { _ = shared.Close() })
	move = func(by time.Duration) {
		_, err := shared.WriteAt(encoding.NativeEndian.AppendUint64(nil, uint64(by/time.Second)), 0)
		testkit.Must(t, err)
	}
	move(0)
	s = newStage(t, 1, 2, "LD_PRELOAD="+library, "MOVED_CLOCK="+file)
	s.making, s.clockMoves = "clock set", true
	s.wire.share.Store(10)
	return s, move
}

// jump sets the clock to each time, two seconds after the other.
func (s *stage) jump(move func(time.Duration), to ...time.Duration) {
	for _, fast := range to {
		<-time.After(2 * time.Second)
		over := s.fault("", history.Undoes)
		move(fast)
		<-time.After(time.Second) // until what was read by the old clock is written
		over()
	}
}

// operate runs a command of an operator.
func (s *stage) operate(database string, args ...string) error {
	return process.Run(s.Ctx, process.Command{Argv: append([]string{s.Relay}, args...), Env: []string{
		"OUTBOX_DATABASE_URL=" + s.Server.DSN(database), "OUTBOX_DATABASE_ALLOW_SUPERUSER=true",
	}})
}
