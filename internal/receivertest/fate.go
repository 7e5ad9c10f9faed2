package receivertest

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
)

const (
	DieAt      = "OUTBOX_TEST_DIE_AT"  // the operation at which a process of the roles "die" and "work-die" kills itself
	DieFlavour = "OUTBOX_TEST_FLAVOUR" // the name of its driver
	FreezeOnly = "OUTBOX_TEST_FREEZE"  // it stops there instead, until the test lets it run
)

// Fate kills this process, or stops it, at one operation on its connections: before something is
// written, half-way through an answer, after the writing, or when something has been read and not
// been used. An operation is named by its moment and how often that has come since a first request
// was read, because no two runs of a process with several connections do everything in the same
// order.
type Fate struct {
	at     string         // "before writing the effect (1)"
	resume chan os.Signal // of a process that is to be stopped
	Begun  chan struct{}  // closed when it is armed

	mu     sync.Mutex
	armed  bool
	passed map[string]int // operations by moment

	writing sync.RWMutex // read-locked from before a writing to after it
}

// NewFate returns the fate that the environment of this process names.
func NewFate() *Fate {
	f := &Fate{at: os.Getenv(DieAt), Begun: make(chan struct{}), passed: map[string]int{}}
	if os.Getenv(FreezeOnly) != "" {
		f.resume = make(chan os.Signal, 1)
		signal.Notify(f.resume, syscall.SIGCONT)
	}
	return f
}

func operation(moment string, n int) string { return fmt.Sprintf("%s (%d)", moment, n) }

func (f *Fate) pass(moment string) {
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

// Arm lets operations count from now on.
func (f *Fate) Arm() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.armed {
		close(f.Begun)
	}
	f.armed = true
}

// AnswerAlive reports to the test, when it asks, that the process did not meet its fate, and which
// operations it has seen.
func (f *Fate) AnswerAlive(p *Player) {
	for range p.Orders {
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

// What AnswerAlive says.
const (
	alive     = "alive: "
	separator = "; "
)

// doomedConn is a connection, to the database or of a client, on which a process may die.
type doomedConn struct {
	net.Conn
	Fate  *Fate
	doing atomic.Pointer[string] // what the statements on it are about; nil for a client's
}

const answer = "the answer"

func (c *doomedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		if c.doing.Load() == nil {
			c.Fate.Arm()
			c.Fate.pass("after reading the request")
		} else {
			c.Fate.pass("after the reply to " + *c.doing.Load())
		}
	}
	return n, err
}

func (c *doomedConn) Write(b []byte) (int, error) {
	c.Fate.writing.RLock()
	defer c.Fate.writing.RUnlock()
	what, half := answer, 0
	if doing := c.doing.Load(); doing != nil {
		what = *doing
	} else {
		half = len(b) / 2
	}
	c.Fate.pass("before writing " + what)
	if half > 0 {
		if n, err := c.Conn.Write(b[:half]); err != nil {
			return n, err
		}
		c.Fate.pass("half-way through " + what)
	}
	n, err := c.Conn.Write(b[half:])
	c.Fate.pass("after writing " + what)
	return half + n, err
}

// DoomedListener makes the connections of clients such ones.
type DoomedListener struct {
	net.Listener
	Fate *Fate
}

// Accept returns the next such connection.
func (l *DoomedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &doomedConn{Conn: conn, Fate: l.Fate}, nil
}

// DoomedConfig makes the connections to the database such ones.
func (p *Player) DoomedConfig(f *Fate) *pgxpool.Config {
	cfg, err := pgxpool.ParseConfig(p.DSN)
	if err != nil {
		panic(err)
	}
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		doomed := &doomedConn{Conn: conn, Fate: f}
		connecting := "connecting"
		doomed.doing.Store(&connecting)
		return doomed, nil
	}
	cfg.ConnConfig.Tracer = StatementNames{}
	return cfg
}

// StatementNames notes on a connection what the statements on it are about.
type StatementNames struct{}

// TraceQueryStart names a statement.
func (StatementNames) TraceQueryStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	nameStatement(conn, data.SQL)
	return ctx
}

// TraceBatchStart names a batch.
func (StatementNames) TraceBatchStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	var all strings.Builder
	for _, query := range data.Batch.QueuedQueries {
		all.WriteString(query.SQL + "\n")
	}
	nameStatement(conn, all.String())
	return ctx
}

// TraceQueryEnd does nothing.
func (StatementNames) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TraceBatchQuery does nothing.
func (StatementNames) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd does nothing.
func (StatementNames) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

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

// DieNumber distinguishes a process of the role "work-die" from the others of its test.
const DieNumber = "OUTBOX_TEST_NUMBER"

// Met returns how many processes met their fate.
func (f Fates) Met(fate string) (n int) {
	for moment, times := range f {
		if strings.HasPrefix(moment, fate+" ") {
			n += times
		}
	}
	return n
}

// Fates are the moments at which processes died or froze, by what they wrote then.
type Fates map[string]int

// Want asserts that a process met its fate at each of the moments. A test that has failed was given
// up half-way.
func (f Fates) Want(t *testing.T, fate string, moments ...string) {
	t.Helper()
	if t.Failed() {
		return
	}
	for _, moment := range moments {
		if f[fate+" "+moment] == 0 {
			t.Errorf("nothing was %s %s, only %q", fate, moment, slices.Sorted(maps.Keys(f)))
		}
	}
}

// Unheard lets no report pile up: a sender that comes again until a key is free makes any number of
// them.
func Unheard(context.Context, consumer.Report) {}

// OperationsOf returns the operations that a process has seen which met no fate.
func OperationsOf(t *testing.T, line string) []string {
	t.Helper()
	list, ok := strings.CutPrefix(line, alive)
	if !ok {
		t.Fatalf("the process that has no fate said %q", line)
	}
	return strings.Split(list, separator)
}

// Thaw lets a frozen process run again, until it ends. One signal is not enough: the process says
// that it stops before it does.
func (p *Process) Thaw() {
	go func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			p.Signal(syscall.SIGCONT)
			select {
			case <-p.Ended:
				return
			case <-tick.C:
			}
		}
	}()
}
