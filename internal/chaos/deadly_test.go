package chaos

import (
	"bytes"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A relay dies of each of the first three requests of one delivery. The other deliveries arrive
// meanwhile, and so does this one, once its relay outlives it. TestCrashLoopIsSetAside has what
// comes after more deaths, which takes minutes.
func TestDeliveryThatKillsItsRelay(t *testing.T) {
	testsize.Long(t)
	const deaths, deadly = 3, "deadly"
	s := newStage(t, 1, 0)
	s.making = "relay killed"
	u := &process.Unit{Role: "relay-1", Rest: 200 * time.Millisecond}
	database, dsn := linkTo(t, s.Server.DSN(outboxName))
	requests := newLink(t, func() (net.Conn, error) { return net.Dial("tcp", s.wire.addr) })
	var sent atomic.Int64
	requests.hear = func(message []byte) {
		if bytes.Contains(message, []byte(deadly)) && sent.Add(1) <= deaths {
			_, p := u.Current()
			p.Signal("KILL")
		}
	}
	requests.dooms(nil) // connections see hear from now on
	u.Launch = func(life string, _ int) process.Command { return s.runRelay(life, dsn, requests.addr(), s.wire.addr) }
	s.relays = append(s.relays, &relay{u, database, requests})
	ended := s.fault(u.Role, history.Undoes)
	produced := s.produceMeanwhile(100, 400)
	s.sell(s.Ctx, 1, sale{key: deadly})
	s.Fill(u)
	produced()
	s.drained()
	ended()
	life, _ := u.Current()
	if t.Logf("%s: %s", life, s.judge()); sent.Load() != deaths+1 || life != "relay-1.4" {
		t.Errorf("%s delivered what was sent %d times", life, sent.Load())
	}
}
