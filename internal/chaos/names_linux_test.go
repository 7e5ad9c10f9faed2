package chaos

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// nameServer is where the relays of TestNamesAreNotFound ask for names.
const nameServer = "127.0.77.53"

// While names are not found, or late, relays lose their connections and cannot make others, to the
// database or to receivers. Nothing is lost, and deliveries continue once names are found. Relays
// alone see another resolv.conf.
func TestNamesAreNotFound(t *testing.T) {
	testsize.Long(t)
	if os.Getuid() != 0 {
		t.Skip("only root may listen where names are asked for")
	}
	found := relaytest.Names{Address: netip.MustParseAddr(loopback)}
	var say atomic.Pointer[relaytest.Names]
	var asked atomic.Int64
	say.Store(&found)
	relaytest.ServeNames(t, net.JoinHostPort(nameServer, "53"), func() relaytest.Names { asked.Add(1); return *say.Load() })
	resolv := filepath.Join(t.TempDir(), "resolv.conf")
	testkit.Must(t, os.WriteFile(resolv, []byte("nameserver "+nameServer+"\n"), 0o644))

	s := newStage(t, 1, 0)
	s.host = "chaos.test"
	s.limits = fmt.Sprintf(`exec unshare --mount /bin/sh -c 'mount --bind %s /etc/resolv.conf && exec "$0" run' "$0";`, resolv)
	s.openRelays(2)
	ended := s.produceMeanwhile(200, 0)
	for making, names := range map[string]relaytest.Names{
		"names are not answered": {Silent: true}, "names are late": {Address: found.Address, After: 2 * time.Second}, "names have no address": {},
		"names fail": {Code: 2}, "names do not exist": {Code: 3}, "names are refused": {Code: 5},
	} {
		s.making = making
		over := s.fault(history.Relays, history.Undoes)
		asked.Store(0)
		say.Store(&names)
		for _, r := range s.relays {
			r.database.reset()
			r.requests.reset()
		}
		<-time.After(4 * time.Second)
		say.Store(&found)
		over()
		if n := asked.Load(); n < 4 {
			t.Errorf("while %s, they were asked for %d times", making, n)
		}
		<-time.After(2 * time.Second)
	}
	ended()
	s.drained()
	t.Log(s.judge())
}
