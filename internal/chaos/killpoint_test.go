package chaos

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// What a relay meets at a message.
const (
	killed = "killed"        // SIGKILL
	frozen = "frozen"        // SIGSTOP for longer than its lease, while another relay works; then SIGCONT, and the message goes its way
	cutOff = "cut-off"       // its connection is reset
	lease  = 8 * time.Second // the shortest for the timeout of these tests
)

// steps are what a relay does to its database, by the words of its statements. Each one is met
// unsent, which is before it, and sent: the database has done it, and the relay does not know. The
// rest are stages of a request: before dial is undialled; half written, half-sent; written, sent;
// status read, answered; before settle and after settle are the settle unsent, and sent. What is
// between the answer to one message and the next message changes nothing that lasts. Commands have
// TestCommandsMeetTheirFateAtEveryMessage, receivers TestKilledAtEveryOperation and
// TestFrozenAtEveryOperation in package consumer.
var steps = map[string]string{
	"register":                     "outbox_relay (name, version",
	"bury a dead relay":            "outbox_rescue (relay_id)",
	"take over a dead one's range": "SET relay_id = $1, fence",
	"take new events":              "outbox_range AS r (seq, relay",
	"claim":                        "SET claim = ",
	"settle events of a range":     "SET ended_at = now() WHERE seq = ANY",
	"settle rows, retries":         "outbox_attempt (event_id",
	"open the breaker":             "breaker_opened_at, breaker_until, breaker_error",
	"take an alert to send":        "outbox_alert_notice AS n",
	"say that an alert is sent":    "SET sent_at = CASE",
	"drain":                        "outbox_relay WHERE id = $1 RETURNING",
}

// A round is what happens to one relay.
type round struct {
	*stage
	database, requests *link // of all relays: one that comes by another address would take its database for a copy
	dsn, fate          string
	n                  int
	step               string // the words of the statement to meet; empty: message n meets the doom
	told               int64  // alerts that were sent before
	met                chan []byte
	goOn               chan bool
	relay              *process.Process
	stopped            bool // the relay was told to stop
}

// A relay takes over from a dead one, delivers, is refused, retries, fails an event, sends an alert
// and stops. It is killed, frozen or cut off at each message of that to its database, and at each
// stage of each request to the receiver or to whom it alerts. Then another relay takes over, or it
// continues: nothing is lost, effects are made once, keys keep their order, the alert is sent.
func TestRelayMeetsItsFateAtEveryMessage(t *testing.T) {
	for _, fate := range []string{killed, frozen, cutOff} {
		for to, stages := range map[string][]stageOfMessage{
			"database": {unsent, sent}, "requests": {undialled, unsent, halfSent, sent, halfAnswered, answered},
		} {
			for _, at := range stages {
				t.Run(strings.Join([]string{fate, to, string(at)}, "/"), func(t *testing.T) {
					testsize.OneIn(t, 5, "killed/database/sent", "cut-off/database/unsent")
					t.Parallel()
					meetsItsFate(t, fate, to, at)
				})
			}
		}
	}
}

func meetsItsFate(t *testing.T, fate, to string, at stageOfMessage) {
	s := newStage(t, 1, 0)
	s.making = fate
	database, dsn := linkTo(t, s.Server.DSN(outboxName))
	requests := newLink(t, func() (net.Conn, error) { return net.Dial("tcp", s.wire.addr) })
	played, rounds, n, met := 0, 0, 0, map[string]bool{}
	play := func(step string) (reached bool) {
		r := &round{stage: s, database: database, requests: requests, dsn: dsn, fate: fate, n: n, step: steps[step], met: make(chan []byte, 1), goOn: make(chan bool)}
		message, doomed, reached := r.play(to, at)
		if played++; doomed {
			rounds++
		}
		for step, words := range steps {
			met[step] = met[step] || bytes.Contains(message, []byte(words))
		}
		if t.Failed() {
			t.Logf("at message %d: %q", n, message)
		}
		return reached
	}
	stride := testsize.Of(1, map[string]int{"database": 67, "requests": 11}[to])
	for n = 1; !t.Failed(); n += stride {
		if !play("") {
			break
		}
	}
	var unmet []string
	if stride == 1 && to == "database" {
		for step := range steps { // message numbers vary from round to round, so that they may miss a step
			for range 20 { // not every round has each step, such as a breaker that opens
				if n++; !met[step] && !t.Failed() {
					play(step)
				}
			}
			if !met[step] {
				unmet = append(unmet, step)
			}
		}
	}
	s.repeats = leftBehind*played + 4*rounds // measured together: 0.7 to 5.3 a round
	figures := s.judge()
	t.Logf("%d times %s: %s", rounds, fate, figures)
	if rounds == 0 || len(unmet) > 0 {
		t.Errorf("in %d rounds no relay met its fate at %q", rounds, unmet)
	}
}

// play lets the relay come to a message, and returns the one at which it met its doom. A message
// that has no answer is reached, and no doom is met.
func (r *round) play(to string, at stageOfMessage) (message []byte, met, reached bool) {
	r.t.Helper()
	r.told = r.wire.alerts.Load()
	r.leaveBehind()
	r.sales("b", 2)
	// 5 in a row open the breaker. Nothing in flight may be accepted or refused for good then, and
	// close it before the database knows.
	r.sell(r.Ctx, 1, sale{key: unfit + r.key("x"), plain: true, due: 400})
	r.wire.refuse.Store(14)

	d := &doom{n: int64(r.n), at: at, meet: func(message []byte) (goOn bool) {
		r.met <- bytes.Clone(message)
		select {
		case goOn = <-r.goOn:
		case <-r.Ctx.Done():
		}
		return goOn
	}}
	if r.step != "" {
		d.step = []byte(r.step)
	}
	l := map[string]*link{"database": r.database, "requests": r.requests}[to]
	l.dooms(d)
	defer close(r.goOn) // so that nothing waits when the test fails
	r.relay = r.start("doomed")
	defer r.relay.Kill()
	r.until("the doom, or the end of the work", func(ctx context.Context) (bool, error) {
		drained, err := process.One[bool](ctx, r.outbox, `SELECT NOT EXISTS (`+selectOpen+`)`)
		return len(r.met) > 0 || drained && r.wire.alerts.Load() > r.told, err
	})
	if len(r.met) == 0 {
		r.stop()
		r.until("the doom, or the end of the relay", func(context.Context) (bool, error) {
			return len(r.met) > 0 || ended(r.relay), nil
		})
	}
	reached = l.sent.Load() >= d.n
	if d.at == undialled {
		reached = l.dials.Load() >= d.n
	}
	if met = len(r.met) > 0; met {
		message = <-r.met
		r.meetFate()
	}
	_, err := r.outbox.Exec(r.Ctx, `DELETE FROM outbox_alert`) // so that the next failure is news
	r.must(err)
	return message, met, reached
}

// meetFate returns when the relay is gone, and everything is delivered, or another relay has
// delivered everything.
func (r *round) meetFate() {
	over := r.fault("doomed", history.Undoes)
	switch r.fate {
	case killed:
		r.relay.Kill()
		over()
		r.goOn <- false
		defer r.start("survivor").Kill()
		r.worked()
		return
	case cutOff:
		r.goOn <- false
		over()
	case frozen:
		r.relay.Signal("STOP")
		thaw := time.After(lease)
		survivor := r.start("survivor")
		defer survivor.Kill()
		r.worked()
		<-thaw
		r.relay.Signal("CONT")
		r.goOn <- true
		over()
		survivor.Kill()
	}
	if !r.stopped {
		r.sales("c", 1)
		r.worked()
		r.stop()
	}
	r.until("the end of the relay", func(context.Context) (bool, error) { return ended(r.relay), nil })
	r.must(r.relay.Failure())
}

// worked waits until everything is delivered, and the alert sent.
func (r *round) worked() {
	r.drained()
	r.must(r.Poll(drainPatience, "the alert", func(context.Context) (bool, error) { return r.wire.alerts.Load() > r.told, nil }))
}

func ended(p *process.Process) bool {
	select {
	case <-p.Ended:
		return true
	default:
		return false
	}
}

func (r *round) stop() {
	r.stopped = true
	r.relay.Signal("TERM")
}

// leftBehind is how many events a round has when its first relay dies: all of them may be accepted
// by then, and nothing of that written.
const leftBehind = 2*3 + 1

// leaveBehind lets a relay die with requests that it has sent.
func (r *round) leaveBehind() {
	var heard atomic.Bool
	r.requests.dooms(&doom{n: 1, at: sent, meet: func([]byte) bool { heard.Store(true); return false }})
	r.sales("a", 3)
	over := r.fault("predecessor", history.Undoes)
	p := r.start("predecessor")
	defer p.Kill()
	r.until("the first answer", func(context.Context) (bool, error) {
		return heard.Load() || r.requests.sent.Load() > 3, nil // the first may be the last of a relay that has just died
	})
	p.Kill()
	over()
}

func (r *round) start(role string) *process.Process {
	p, err := process.Start(r.runRelay(role+".1", r.dsn, r.requests.addr(), r.requests.addr(), "OUTBOX_RELAY_LEASE="+lease.String()))
	r.must(err)
	return p
}

func (r *round) key(name string) string { return fmt.Sprintf("%d-%s", r.n, name) }

// sales commits events: n of one ordering key, as many of none, and one that is due later.
func (r *round) sales(name string, n int) {
	for i := range n {
		r.sell(r.Ctx, 1, sale{key: r.key(fmt.Sprintf("%s-%d-ordered", name, i)), orderingKey: r.key("k"), plain: i == 1})
		r.sell(r.Ctx, 1, sale{key: r.key(fmt.Sprintf("%s-%d-free", name, i))})
	}
	r.sell(r.Ctx, 1, sale{key: r.key(name + "-later"), due: 300})
}
