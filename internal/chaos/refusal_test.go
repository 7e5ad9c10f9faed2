package chaos

import (
	"bytes"
	"context"
	bigendian "encoding/binary"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// Where a server refuses.
const (
	connecting = "connecting" // a connection, before anything is sent on it
	preparing  = "preparing"  // a statement, when it is parsed
	executing  = "executing"  // a statement, and with it its transaction
)

// A refuser lets a server refuse one connection or statement with an error, and go on. The server
// itself does it, so that a transaction ends as it does after any error: a link rewrites the
// message.
type refuser struct {
	at, code string

	mu      sync.Mutex // guards what follows
	n, came int        // n: the one to refuse; came: how many came
	met     string     // what was refused
}

// A refusing connection has the state of one whose messages are read.
type refusing struct {
	begun bool                   // the start-up packet has passed
	rest  []byte                 // of a message that has not come whole
	code  atomic.Pointer[string] // what the next error that a link has made is to say
}

// next counts what may be refused, and reports whether it is to be refused.
func (r *refuser) next(at string, message []byte) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at != r.at {
		return false
	}
	r.came++
	if r.came == r.n {
		r.met = string(message[:min(len(message), 300)])
	}
	return r.came == r.n
}

// begin lets the nth from now on be refused.
func (r *refuser) begin(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.n, r.came, r.met = n, 0, ""
}

func (r *refuser) state() (met string, reached bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.met, r.came >= r.n
}

// connection refuses one as a server that has no room for it, and reports whether it did.
func (r *refuser) connection(near net.Conn) bool {
	if !r.next(connecting, []byte("a connection")) {
		return false
	}
	defer near.Close()
	if _, err := near.Read(make([]byte, 10_000)); err == nil { // or the answer might be lost with what was not read
		_, _ = near.Write(message('E', "SFATAL\x00VFATAL\x00C"+r.code+"\x00Mrefused by a link\x00\x00"))
	}
	return true
}

func message(kind byte, body string) []byte {
	return append(bigendian.BigEndian.AppendUint32([]byte{kind}, uint32(4+len(body))), body...)
}

// refuse returns the whole messages of what came, with the one that is to be refused rewritten.
func (c *conn) refuse(r *refuser, b []byte) (out []byte) {
	c.rest = append(c.rest, b...)
	for {
		header := 5
		if !c.begun {
			header = 4 // the start-up packet has no type
		}
		if len(c.rest) < header {
			return out
		}
		size := header - 4 + int(bigendian.BigEndian.Uint32(c.rest[header-4:]))
		if len(c.rest) < size {
			return out
		}
		m := c.rest[:size:size]
		c.rest = c.rest[size:]
		if c.begun {
			m = c.rewritten(r, m)
		}
		c.begun = true
		out = append(out, m...)
	}
}

// rewritten returns a message, or one instead of it that fails.
func (c *conn) rewritten(r *refuser, m []byte) []byte {
	fields := bytes.SplitN(m[5:], []byte{0}, 3)
	switch m[0] {
	case 'P': // name, query, types
		if r.next(preparing, fields[1]) {
			c.code.Store(&r.code)
			return message('P', string(fields[0])+"\x00!\x00\x00\x00")
		}
	case 'B': // portal, statement, the rest
		if r.next(executing, c.prepared[string(fields[1])+"\x00"]) {
			c.code.Store(&r.code)
			return message('B', string(fields[0])+"\x00refused by a link\x00"+string(fields[2]))
		}
	case 'Q':
		if r.next(executing, fields[0]) {
			c.code.Store(&r.code)
			if strings.EqualFold(string(fields[0]), "commit") { // one that fails ends its transaction
				return message('Q', "ROLLBACK; SELECT refused_by_a_link\x00")
			}
			return message('Q', "SELECT refused_by_a_link\x00")
		}
	}
	return m
}

// answers gives the error that a link has made the code that it is to have: without one, these are
// a syntax error, an unknown statement and an unknown column.
func (c *conn) answers(b []byte) []byte {
	code := c.code.Load()
	if code == nil {
		return b
	}
	for _, made := range []string{"42601", "26000", "42703"} {
		b = bytes.ReplaceAll(b, []byte("\x00C"+made+"\x00"), []byte("\x00C"+*code+"\x00"))
	}
	return b
}

// refusable has the errors, each of which is met in its own way.
var refusable = map[string][]string{
	connecting: {"53300"}, preparing: {"57014"}, executing: {"40001", "53100", "55P03", "25006", "23514", "XX001"},
}

// The server refuses a relay one connection, or ends one statement with an error, once. Whichever
// it is, the relay continues. Nothing is lost, and nothing is sent again: the relay knows that the
// statement did nothing, and repeats it. The receivers' half of this is
// TestAnyStatementOfAReceiverMayBeRefused.
func TestAnyStatementOfARelayMayBeRefused(t *testing.T) {
	for at, codes := range refusable {
		for _, code := range codes {
			t.Run(at+"/"+code, func(t *testing.T) {
				testsize.OneIn(t, 9, "executing/40001")
				t.Parallel()
				isRefused(t, at, code)
			})
		}
	}
}

func isRefused(t *testing.T, at, code string) {
	s := newStage(t, 1, 0)
	s.making = at + " is refused with " + code
	database, dsn := linkTo(t, s.Server.DSN(outboxName))
	refuser := &refuser{at: at, code: code}
	database.refuser.Store(refuser)
	requests := newLink(t, func() (net.Conn, error) { return net.Dial("tcp", s.wire.addr) })
	rounds, statements := 0, map[string]bool{}
	for n := 1; !t.Failed(); n += testsize.Of(1, map[string]int{connecting: 3, preparing: 31, executing: 41}[at]) {
		r := &round{stage: s, database: database, requests: requests, dsn: dsn, n: n}
		r.meets(refuser)
		met, reached := refuser.state()
		if t.Failed() {
			t.Logf("at %d: %q", n, met)
		}
		if !reached {
			break
		}
		rounds++
		statements[met] = true
	}
	s.repeats = 10 * rounds // each begins with requests that were accepted, and whose relay died
	t.Logf("%d times, %d different ones: %s", rounds, len(statements), s.judge())
	failed, err := process.One[int](s.Ctx, s.outbox, `SELECT count(*) FROM outbox_delivery WHERE status = 'failed' AND attempts = 1`)
	s.must(err)
	if rounds == 0 || failed < rounds {
		t.Errorf("%d refusals, and %d events that every receiver refuses have failed", rounds, failed)
	}
}

// The database refuses a receiver one connection, or ends one statement with an error, once.
// That costs at most one request, which the relay sends again. An event that is recorded already
// costs none: the receiver works it again. The effect is made once.
func TestAnyStatementOfAReceiverMayBeRefused(t *testing.T) {
	for _, way := range []string{"worked", "recorded"} {
		for at, codes := range refusable {
			for _, code := range codes {
				t.Run(strings.Join([]string{way, at, code}, "/"), func(t *testing.T) {
					testsize.OneIn(t, 9, "executing/40001")
					t.Parallel()
					receiverIsRefused(t, way == "recorded", at, code)
				})
			}
		}
	}
}

func receiverIsRefused(t *testing.T, records bool, at, code string) {
	s := openStage(t, 1, records)
	s.openRelays(1)
	s.making = at + " is refused with " + code
	refuser := &refuser{at: at, code: code}
	rounds, statements := 0, map[string]bool{}
	for n := 1; !t.Failed(); n += testsize.Of(1, 13) {
		(&round{stage: s, n: n}).receiversMeet(refuser)
		met, reached := refuser.state()
		if t.Failed() {
			t.Logf("at %d: %q", n, met)
		}
		if !reached {
			break
		}
		rounds++
		statements[met] = true
	}
	figures := s.judge()
	t.Logf("%d times, %d different ones: %s", rounds, len(statements), figures)
	if rounds == 0 || figures.Refused > rounds || figures.Repeats > 0 {
		t.Errorf("%d refusals cost %d requests, and %d were accepted again", rounds, figures.Refused, figures.Repeats)
	}
}

// receiversMeet gives each receiver a life, in which it connects and prepares its statements.
func (r *round) receiversMeet(refuser *refuser) {
	r.t.Helper()
	refuser.begin(r.n)
	for i, receiver := range r.receivers {
		defer r.fault(receiver.Role, history.None)()
		r.wire.receivers[i].Store(nil)
		receiver.database.refuser.Store(refuser)
		receiver.Kill()
		r.until(receiver.Role+" to listen", func(context.Context) (bool, error) { return r.wire.receivers[i].Load() != nil, nil })
	}
	r.sales("a", 2)
	r.drained()
}

// meets is the life of a relay that is refused one statement.
func (r *round) meets(refuser *refuser) {
	r.t.Helper()
	r.told = r.wire.alerts.Load()
	r.leaveBehind()
	r.sales("b", 2)
	_, err := r.outbox.Exec(r.Ctx, insertEvent, unfit+r.key("x"), "", 0)
	r.must(err)
	r.wire.refuse.Store(10)
	refuser.begin(r.n)
	r.relay = r.start("refused")
	defer r.relay.Kill()
	r.worked()
	r.sales("c", 1)
	r.worked()
	r.stop()
	r.until("the end of the relay", func(context.Context) (bool, error) { return ended(r.relay), nil })
	r.must(r.relay.Failure())
	_, err = r.outbox.Exec(r.Ctx, `DELETE FROM outbox_alert`) // so that the next failure is news
	r.must(err)
}
