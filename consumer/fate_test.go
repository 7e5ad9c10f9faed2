package consumer_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	dieAt      = "OUTBOX_TEST_DIE_AT"  // the operation at which a process of the roles "die" and "work-die" kills itself
	dieFlavour = "OUTBOX_TEST_FLAVOUR" // the name of its driver
	freezeOnly = "OUTBOX_TEST_FREEZE"  // it stops there instead, until the test lets it go on
)

// fate kills this process, or stops it, at one operation on its connections: before something is written, half-way
// through an answer, after the writing, or when something has been read and not been looked at. An operation is named
// by its moment and how often that has come since a first request was read, because no two runs of a process with several
// connections do everything in the same order.
type fate struct {
	at     string         // "before writing the effect (1)"
	resume chan os.Signal // of a process that is to be stopped
	begun  chan struct{}  // closed when it is armed

	mu     sync.Mutex
	armed  bool
	passed map[string]int // operations by moment

	writing sync.RWMutex // read-locked from before a writing to after it
}

func newFate() *fate {
	f := &fate{at: os.Getenv(dieAt), begun: make(chan struct{}), passed: map[string]int{}}
	if os.Getenv(freezeOnly) != "" {
		f.resume = make(chan os.Signal, 1)
		signal.Notify(f.resume, syscall.SIGCONT)
	}
	return f
}

func operation(moment string, n int) string { return fmt.Sprintf("%s (%d)", moment, n) }

func (f *fate) pass(moment string) {
	f.mu.Lock()
	if !f.armed {
		f.mu.Unlock()
		return
	}
	f.passed[moment]++
	met := operation(moment, f.passed[moment]) == f.at
	f.mu.Unlock()
	if !met {
		return
	}
	if f.resume != nil {
		fmt.Println("frozen " + moment)
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		<-f.resume
		return
	}
	fmt.Println("dying " + moment)
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // until the kernel gets round to it
}

func (f *fate) arm() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.armed {
		close(f.begun)
	}
	f.armed = true
}

// answerAlive tells the test, when it asks, that the process did not meet its fate, and which operations it has seen.
func (f *fate) answerAlive(p *player) {
	for range p.orders {
		f.writing.Lock() // what the client has read already may have its fatal moment still to come
		f.mu.Lock()
		var all []string
		for moment, n := range f.passed {
			for i := range n {
				all = append(all, operation(moment, i+1))
			}
		}
		f.mu.Unlock()
		slices.Sort(all)
		fmt.Println(alive + strings.Join(all, separator))
		f.writing.Unlock()
	}
}

// What answerAlive says.
const (
	alive     = "alive: "
	separator = "; "
)

// doomedConn is a connection, to the database or of a client, on which a process may die.
type doomedConn struct {
	net.Conn
	fate  *fate
	doing atomic.Pointer[string] // what the statements on it are about; nil for a client's
}

const answer = "the answer"

func (c *doomedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		if c.doing.Load() == nil {
			c.fate.arm()
			c.fate.pass("after reading the request")
		} else {
			c.fate.pass("after the reply to " + *c.doing.Load())
		}
	}
	return n, err
}

func (c *doomedConn) Write(b []byte) (int, error) {
	c.fate.writing.RLock()
	defer c.fate.writing.RUnlock()
	what, half := answer, 0
	if doing := c.doing.Load(); doing != nil {
		what = *doing
	} else {
		half = len(b) / 2
	}
	c.fate.pass("before writing " + what)
	if half > 0 {
		if n, err := c.Conn.Write(b[:half]); err != nil {
			return n, err
		}
		c.fate.pass("half-way through " + what)
	}
	n, err := c.Conn.Write(b[half:])
	c.fate.pass("after writing " + what)
	return half + n, err
}

// doomedListener makes the connections of clients such ones.
type doomedListener struct {
	net.Listener
	fate *fate
}

func (l *doomedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &doomedConn{Conn: conn, fate: l.fate}, nil
}

// doomedConfig makes the connections to the database such ones.
func (p *player) doomedConfig(f *fate) *pgxpool.Config {
	cfg, err := pgxpool.ParseConfig(p.dsn)
	if err != nil {
		panic(err)
	}
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		doomed := &doomedConn{Conn: conn, fate: f}
		connecting := "connecting"
		doomed.doing.Store(&connecting)
		return doomed, nil
	}
	cfg.ConnConfig.Tracer = statementNames{}
	return cfg
}

// statementNames tells a connection what the statements on it are about.
type statementNames struct{}

func (statementNames) TraceQueryStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	nameStatement(conn, data.SQL)
	return ctx
}

func (statementNames) TraceBatchStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	var all strings.Builder
	for _, query := range data.Batch.QueuedQueries {
		all.WriteString(query.SQL + "\n")
	}
	nameStatement(conn, all.String())
	return ctx
}

func (statementNames) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData)     {}
func (statementNames) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (statementNames) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// nameStatement names a batch by the part of it that matters most.
func nameStatement(conn *pgx.Conn, text string) {
	name := "another statement"
	for _, part := range []struct{ text, name string }{
		{"INSERT INTO processed_events", "the admission"},
		{"claim = e.claim + 1", "the claim"},
		{"SELECT payload", "the beginning of the work"},
		{"INSERT INTO effect", "the effect"},
		{"inbox_prune(", "the pruning"},
		{"commit", "COMMIT"},
		{"begin", "BEGIN"},
	} {
		if strings.Contains(text, part.text) {
			name = part.name
			break
		}
	}
	conn.PgConn().Conn().(*doomedConn).doing.Store(&name)
}
