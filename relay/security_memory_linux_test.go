package relay

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// peak returns the most memory that a process has had, in bytes.
func peak(t *testing.T, pid int) (bytes int) {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	relaytest.Must(t, err)
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	if _, err := fmt.Sscanf(rest, "%d kB", &bytes); err != nil {
		t.Fatal(err)
	}
	return bytes << 10
}

// A stranger sends notifications of 8 kB in one transaction, 160 MB in all. The relay keeps none of
// them.
func TestSecurityNotificationsTakeNoMemory(t *testing.T) {
	testsize.Long(t)
	t.Parallel()
	db := relaytest.Covered(t)
	relay, _ := startProcess(t, db.DSN, relaytest.NewReceiver(t, nil).URL)
	relaytest.Becomes(db, 1, `SELECT count(*)::int FROM outbox_relay`)
	stranger := relaytest.Stranger(db, "psql")
	before := peak(t, relay.Process.Pid)
	for round := range 2 {
		_, err := stranger.Exec(t.Context(), `SELECT count(pg_notify('outbox_wake', i || repeat('x', 7900))) FROM generate_series(1, 20000) i`)
		relaytest.Must(t, err)
		db.Insert(1, fmt.Sprint("key-", round))
		relaytest.Becomes(db, 0, `SELECT count(*)::int FROM outbox_delivery WHERE status = 'pending'`)
	}
	// The session has read all of it once its heartbeat continues.
	relaytest.Becomes(db, true, `SELECT heartbeat_at > $1 FROM outbox_relay`, relaytest.Row[time.Time](db, `SELECT now()`))
	more := peak(t, relay.Process.Pid) - before
	t.Logf("%d MiB, %d MiB more than before", (before+more)>>20, more>>20)
	if more > 64<<20 {
		t.Errorf("the relay took %d MiB more", more>>20)
	}
}
