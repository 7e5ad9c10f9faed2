package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
)

// LoadCommand is the other process of bench: producers and receiver, whose processor time is not the relay's. It is
// started by bench alone, reads commands from standard input, and ends with it.
type LoadCommand struct{}

// loadOrder is one command to the process of LoadCommand.
type loadOrder struct {
	// The first one says where the events go.
	DSN     string `json:"dsn,omitempty"`
	Schema  string `json:"schema,omitempty"`
	Payload int    `json:"payload,omitempty"`
	// The others say how many to insert, from which number on; at once, or so many a second.
	First  int `json:"first,omitempty"`
	Events int `json:"events,omitempty"`
	Rate   int `json:"rate,omitempty"`
	// For is for how long to insert one by one: at the rate, or without one as fast as the database answers.
	For time.Duration `json:"for,omitempty"`
}

// loadAnswer is the answer to a loadOrder.
type loadAnswer struct {
	Error string `json:"error,omitempty"`
	URL   string `json:"url,omitempty"` // of its receiver
	// The ids of the events that were inserted one by one, and when each was committed, in nanoseconds since 1970.
	IDs       []int64 `json:"ids,omitempty"`
	Committed []int64 `json:"committed,omitempty"`
	Inserted  int     `json:"inserted,omitempty"` // within loadOrder.For
}

func (LoadCommand) Run(inv *cli.Invocation) error {
	ctx, cancel := context.WithCancel(inv.Ctx)
	defer cancel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("start the receiver of bench: %w", err)
	}
	server := &http.Server{Handler: http.HandlerFunc(answerOK), ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }() // until it is closed
	defer server.Close()

	p := &producers{}
	defer func() { p.close() }()
	orders := make(chan loadOrder)
	go func() {
		defer close(orders)
		defer cancel() // bench has ended, in order or not: what is under way ends too
		for decoder := json.NewDecoder(inv.Stdin); ; {
			var order loadOrder
			if decoder.Decode(&order) != nil {
				return
			}
			orders <- order
		}
	}()
	encoder := json.NewEncoder(inv.Stdout)
	for order := range orders {
		answer := loadAnswer{URL: "http://" + listener.Addr().String() + "/"}
		if err := p.execute(ctx, order, &answer); err != nil {
			answer.Error = cli.OneLine(err.Error())
		}
		_ = encoder.Encode(answer) // without a reader the input ends as well
	}
	return nil
}

func answerOK(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	w.WriteHeader(http.StatusOK)
}

// connections is how many connections the events that are committed one by one come over.
const connections = 8

// producers insert events into the schema of a bench.
type producers struct {
	pool    *pgxpool.Pool
	table   string
	payload string
}

func (p *producers) close() {
	if p.pool != nil {
		p.pool.Close()
	}
}

func (p *producers) execute(ctx context.Context, order loadOrder, answer *loadAnswer) (err error) {
	switch {
	case order.DSN != "":
		// The name of the table is written out, because a pooler takes no search_path.
		p.table = pgx.Identifier{order.Schema, "outbox"}.Sanitize()
		p.payload = `{"pad":"` + strings.Repeat("x", max(0, order.Payload-len(`{"pad":""}`))) + `"}`
		p.pool, err = openProducers(ctx, order.DSN)
		return err
	case order.Rate > 0:
		answer.IDs, answer.Committed, err = p.steady(ctx, order)
		return err
	case order.For > 0:
		answer.Inserted, err = p.insert(ctx, order)
		return err
	}
	return p.fill(ctx, order.First, order.Events)
}

func openProducers(ctx context.Context, dsn string) (*pgxpool.Pool, error) {
	cfg, problem := config.ParseDatabaseURL(dsn)
	if problem != "" {
		return nil, errors.New("database.url " + problem)
	}
	cfg.MaxConns, cfg.MinConns = connections, connections
	cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe // prepares nothing that outlives a transaction
	return pgxpool.NewWithConfig(ctx, cfg)
}

// fill inserts events in large transactions.
func (p *producers) fill(ctx context.Context, first, events int) error {
	const batch = 10_000
	for done := 0; done < events; done += batch {
		_, err := p.pool.Exec(ctx, `INSERT INTO `+p.table+` (event_type, payload, idempotency_key)
			SELECT 'bench.event', $1::json, 'bench-' || i FROM generate_series($2::int, $3::int) i`,
			p.payload, first+done, first+min(done+batch, events)-1)
		if err != nil {
			return fmt.Errorf("insert events: %w", err)
		}
	}
	return nil
}

// insert commits events one by one over all connections, as fast as the database answers, and returns their number.
func (p *producers) insert(ctx context.Context, order loadOrder) (inserted int, err error) {
	until := time.Now().Add(order.For)
	var next atomic.Int64
	failures := make([]error, connections)
	statement := `INSERT INTO ` + p.table + ` (event_type, payload, idempotency_key) VALUES ('bench.event', $1, $2)`
	var working sync.WaitGroup
	for worker := range connections {
		working.Go(func() {
			for time.Now().Before(until) && failures[worker] == nil {
				_, failures[worker] = p.pool.Exec(ctx, statement, p.payload, fmt.Sprintf("bench-%d", order.First+int(next.Add(1))))
			}
		})
	}
	working.Wait()
	if err := errors.Join(failures...); err != nil {
		return 0, fmt.Errorf("insert events one by one: %w", err)
	}
	return int(next.Load()), nil
}

// late is for how long after the end of the rate the events are committed that were due before.
const late = time.Second

// steady commits one event after the other at its time, however late those before it are. What a slow database has not committed shortly
// after the end is left out.
func (p *producers) steady(ctx context.Context, order loadOrder) (ids, committed []int64, err error) {
	ids, committed = make([]int64, order.Events), make([]int64, order.Events)
	begun := time.Now()
	until := begun.Add(order.For + late)
	due := make(chan int, order.Events)
	failures := make([]error, connections)
	insert := `INSERT INTO ` + p.table + ` (event_type, payload, idempotency_key) VALUES ('bench.event', $1, $2) RETURNING id`
	var working sync.WaitGroup
	for worker := range connections {
		working.Go(func() {
			for n := range due {
				if time.Now().After(until) {
					continue
				}
				err := p.pool.QueryRow(ctx, insert, p.payload, fmt.Sprintf("bench-%d", order.First+n)).Scan(&ids[n])
				if err != nil {
					failures[worker] = fmt.Errorf("insert an event: %w", err)
					continue
				}
				committed[n] = time.Now().UnixNano()
			}
		})
	}
	for n := range order.Events {
		if wait := time.Until(begun.Add(time.Duration(n) * time.Second / time.Duration(order.Rate))); wait > 0 {
			select {
			case <-time.After(wait):
			case <-ctx.Done():
			}
		}
		due <- n
	}
	close(due)
	working.Wait()
	if err := errors.Join(errors.Join(failures...), ctx.Err()); err != nil {
		return nil, nil, err
	}
	none := func(value int64) bool { return value == 0 }
	if ids, committed = slices.DeleteFunc(ids, none), slices.DeleteFunc(committed, none); len(ids) == 0 {
		return nil, nil, errors.New("no event was committed in time")
	}
	return ids, committed, nil
}

// A load is the process of LoadCommand, as its parent sees it.
type load struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func startLoad(ctx context.Context, inv *cli.Invocation) (*load, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	l := &load{cmd: exec.CommandContext(ctx, self, "bench-load")}
	l.cmd.Env = inv.Env
	if l.in, err = l.cmd.StdinPipe(); err == nil {
		var out io.Reader
		if out, err = l.cmd.StdoutPipe(); err == nil {
			l.out = bufio.NewReaderSize(out, 1<<20)
			err = l.cmd.Start()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("start producers: %w", err)
	}
	return l, nil
}

func (l *load) call(order loadOrder) (answer loadAnswer, err error) {
	if err := json.NewEncoder(l.in).Encode(order); err != nil {
		return answer, fmt.Errorf("ask the producers: %w", err)
	}
	line, err := l.out.ReadBytes('\n')
	if err != nil {
		return answer, fmt.Errorf("the producers ended: %w", err)
	}
	if err := json.Unmarshal(line, &answer); err != nil {
		return answer, fmt.Errorf("read the producers' answer: %w", err)
	}
	if answer.Error != "" {
		return answer, errors.New(answer.Error)
	}
	return answer, nil
}

// stop ends the process by closing its input. How it ends then does not matter.
func (l *load) stop() {
	l.in.Close()
	_ = l.cmd.Wait()
}
