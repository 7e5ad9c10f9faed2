package consumer_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	dieAt      = "OUTBOX_TEST_DIE_AT"  // at which operation a process of the roles "die" and "work-die" kills itself
	dieFlavour = "OUTBOX_TEST_FLAVOUR" // the name of its driver
	freezeOnly = "OUTBOX_TEST_FREEZE"  // it stops there instead, until somebody lets it go on
)

// fate kills this process, or stops it, at one operation on its connections, counted from when it is armed: before
// something is written, half-way through an answer, after the writing, or when something has been read and nobody has
// looked at it.
type fate struct {
	at     int64
	armed  atomic.Bool
	passed atomic.Int64
	resume chan os.Signal // of a process that is to be stopped

	writing sync.RWMutex // read-locked from before a writing to after it
}

func newFate() *fate {
	at, err := strconv.ParseInt(os.Getenv(dieAt), 10, 64)
	if err != nil {
		panic(err)
	}
	f := &fate{at: at}
	if os.Getenv(freezeOnly) != "" {
		f.resume = make(chan os.Signal, 1)
		signal.Notify(f.resume, syscall.SIGCONT)
	}
	return f
}

func (f *fate) pass(moment, what string) {
	if !f.armed.Load() || f.passed.Add(1) != f.at {
		return
	}
	if f.resume != nil {
		fmt.Printf("frozen %s %s\n", moment, what)
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		<-f.resume
		return
	}
	fmt.Printf("dying %s %s\n", moment, what)
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // until the kernel gets round to it
}

// answerAlive tells the test, when it asks, that the process did not come to its fatal operation.
func (f *fate) answerAlive(p *player) {
	for range p.orders {
		f.writing.Lock() // what the client has read already may have its fatal moment still to come
		fmt.Printf("alive after %d operations\n", f.passed.Load())
		f.writing.Unlock()
	}
}

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
			c.fate.armed.Store(true)
			c.fate.pass("after reading", "the request")
		} else {
			c.fate.pass("after the reply to", *c.doing.Load())
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
	c.fate.pass("before writing", what)
	if half > 0 {
		if n, err := c.Conn.Write(b[:half]); err != nil {
			return n, err
		}
		c.fate.pass("half-way through", what)
	}
	n, err := c.Conn.Write(b[half:])
	c.fate.pass("after writing", what)
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
