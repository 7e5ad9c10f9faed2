package consumer_test

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/outbox-relay/outbox-relay/consumer"
)

const (
	dieAt      = "OUTBOX_TEST_DIE_AT"  // at which operation a process of the role "die" kills itself
	dieFlavour = "OUTBOX_TEST_FLAVOUR" // the name of its driver
)

// fate kills this process at one operation on its connections, counted from when it is armed: before something is
// written, half-way through an answer, after the writing, or when something has been read and nobody has looked at it.
type fate struct {
	at     int64
	armed  atomic.Bool
	passed atomic.Int64

	writing sync.RWMutex // read-locked from before a writing to after it
}

func newFate() *fate {
	at, err := strconv.ParseInt(os.Getenv(dieAt), 10, 64)
	if err != nil {
		panic(err)
	}
	return &fate{at: at}
}

func (f *fate) pass(moment, what string) {
	if !f.armed.Load() || f.passed.Add(1) != f.at {
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
		{"commit", "COMMIT"},
		{"INSERT INTO processed_events", "the admission"},
		{"INSERT INTO effect", "the effect"},
		{"begin", "BEGIN"},
	} {
		if strings.Contains(text, part.text) {
			name = part.name
			break
		}
	}
	conn.PgConn().Conn().(*doomedConn).doing.Store(&name)
}

// receiveAndDie is a receiver that kills itself at one of its operations.
func receiveAndDie(p *player) {
	f := newFate()
	cfg := p.doomedConfig(f)
	var middleware func(http.Handler) http.Handler
	flavour := flavours[0]
	switch os.Getenv(dieFlavour) {
	case flavours[0].name:
		pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
		if err == nil {
			err = pool.Ping(context.Background())
		}
		if err != nil {
			panic(err)
		}
		middleware = consumer.Middleware(pool, consumer.Config{Secrets: []string{secretText}})
	default:
		flavour = flavours[1]
		db := stdlib.OpenDB(*cfg.ConnConfig)
		if err := db.Ping(); err != nil {
			panic(err)
		}
		middleware = consumer.MiddlewareSQL(db, consumer.Config{Secrets: []string{secretText}})
	}
	go f.answerAlive(p)
	listener := &doomedListener{Listener: p.listen(), fate: f}
	panic(http.Serve(listener, middleware(effect(&env{flavour: flavour}))))
}

// deaths are the moments at which processes died, by what they wrote last.
type deaths map[string]int

// want asserts that a process died at each of the moments.
func (d deaths) want(t *testing.T, moments ...string) {
	t.Helper()
	for _, moment := range moments {
		if d["dying "+moment] == 0 {
			t.Errorf("nothing died %s, only %q", moment, slices.Sorted(maps.Keys(d)))
		}
	}
}

// fateOf waits for the end of a process that may be doomed, and reports when it died; false if it lives.
func fateOf(t *testing.T, p *process) (moment string, died bool) {
	t.Helper()
	p.order("alive?")
	moment = p.wantLine(t)
	died = strings.HasPrefix(moment, "dying ")
	if died {
		<-p.ended
		if !p.killed() {
			t.Fatalf("the process ended with %v", p.cmd.ProcessState)
		}
	}
	p.kill()
	return moment, died
}

// A receiver is killed at every single operation on its connections, one after the other. Whatever the client has heard,
// it comes again as a relay does, and finds the effect made, or makes it: once.
func TestKilledAtEveryOperation(t *testing.T) {
	eachFlavour(t, func(t *testing.T, f flavour) {
		e := newEnv(t, f, consumer.Config{}, effect) // the receiver that comes after the crash
		seen, replayed := deaths{}, 0
		for n, alive := 1, false; !alive; n++ {
			doomed := launchFor(t, "die", e.dsn, dieAt+"="+strconv.Itoa(n), dieFlavour+"="+f.name)
			key := "k" + strconv.Itoa(n)
			first, err := e.try(e.newRequestTo(doomed.wantLine(t), key, "{}"))
			if err == nil {
				wantFirst(t, first, 201, `{"done":"`+key+`"}`)
			}
			moment, died := fateOf(t, doomed)
			if alive = !died; alive {
				if err != nil {
					t.Errorf("%s, and gave no answer: %v", moment, err)
				}
				t.Logf("%d deaths at as many operations, %d of them after the commit; then %s", n-1, replayed, moment)
				continue
			}
			seen[moment]++
			again := e.post(key, "{}")
			for again.status == http.StatusConflict { // until the server has noticed the death
				again = e.post(key, "{}")
			}
			switch {
			case again.header.Get(consumer.HeaderReplayed) != "":
				wantReplayed(t, again, 201, `{"done":"`+key+`"}`)
				replayed++
			case err == nil:
				t.Errorf("%s: the client was answered, and the handler ran again", moment)
			default:
				wantFirst(t, again, 201, `{"done":"`+key+`"}`)
			}
			e.wantRows(key, 1, 1)
		}
		seen.want(t,
			"before writing the admission", "after the reply to the admission",
			"before writing the effect", "after the reply to the effect",
			"before writing COMMIT", "after writing COMMIT", "after the reply to COMMIT",
			"before writing the answer", "half-way through the answer", "after writing the answer")
	})
}
