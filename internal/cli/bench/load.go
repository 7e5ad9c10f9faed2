package bench

import (
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
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/cli"
	"github.com/outbox-relay/outbox-relay/internal/cli/config"
	"github.com/outbox-relay/outbox-relay/internal/measure"
)

// LoadCommand is the other process of bench: producers and receiver, whose processor time is not
// the relay's. It is started by bench alone, reads commands from standard input, and ends with it.
type LoadCommand struct{}

// loadOrder is the argument of a command to the process of LoadCommand: of "open" the first three
// fields, of "fill", "steady" and "insert" the others.
type loadOrder struct {
	DSN     string        `json:"dsn,omitempty"` // where the events go
	Schema  string        `json:"schema,omitempty"`
	Payload int           `json:"payload,omitempty"`
	First   int           `json:"first,omitempty"` // the number of the first event
	Events  int           `json:"events,omitempty"`
	Rate    int           `json:"rate,omitempty"` // events a second
	For     time.Duration `json:"for,omitempty"`  // for how long to insert one by one
}

// loadAnswer is the answer to a loadOrder.
type loadAnswer struct {
	URL string `json:"url,omitempty"` // of its receiver
	// The ids of the events that were inserted at a rate, and when each was committed, in
	// nanoseconds since 1970.
	IDs       []int64 `json:"ids,omitempty"`
	Committed []int64 `json:"committed,omitempty"`
	Inserted  int     `json:"inserted,omitempty"` // within loadOrder.For
}

func (LoadCommand) Run(inv *cli.Invocation) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("start the receiver of bench: %w", err)
	}
	server := &http.Server{Handler: http.HandlerFunc(answerOK), ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }() // until it is closed
	defer server.Close()

	p := &producers{}
	defer func() { p.close() }()
	return measure.Serve(inv.Ctx, inv.Stdin, inv.Stdout, func(ctx context.Context, name string, arg json.RawMessage) (any, error) {
		var order loadOrder
		if err := json.Unmarshal(arg, &order); err != nil {
			return nil, err
		}
		answer := loadAnswer{URL: "http://" + listener.Addr().String() + "/"}
		if err := p.execute(ctx, name, order, &answer); err != nil {
			return nil, errors.New(cli.OneLine(err.Error()))
		}
		return answer, nil
	})
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

func (p *producers) execute(ctx context.Context, name string, order loadOrder, answer *loadAnswer) (err error) {
	switch name {
	case "open":
		// The name of the table is written out, because a pooler takes no search_path.
		p.table = pgx.Identifier{order.Schema, "outbox"}.Sanitize()
		p.payload = `{"pad":"` + strings.Repeat("x", max(0, order.Payload-len(`{"pad":""}`))) + `"}`
		p.pool, err = openProducers(ctx, order.DSN)
	case "steady":
		answer.IDs, answer.Committed, err = p.steady(ctx, order)
	case "insert":
		answer.Inserted, err = measure.Closed(ctx, connections, order.For, func(ctx context.Context, n int) error {
			_, err := p.insert(ctx, order.First+n)
			return err
		})
	default:
		err = p.fill(ctx, order.First, order.Events)
	}
	return err
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

// insert commits one event and returns its id.
func (p *producers) insert(ctx context.Context, n int) (id int64, err error) {
	statement := `INSERT INTO ` + p.table + ` (event_type, payload, idempotency_key) VALUES ('bench.event', $1, $2) RETURNING id`
	if err = p.pool.QueryRow(ctx, statement, p.payload, fmt.Sprintf("bench-%d", n)).Scan(&id); err != nil {
		return 0, fmt.Errorf("insert an event: %w", err)
	}
	return id, nil
}

// late is for how long after the end of the rate the events are committed that were due before.
const late = time.Second

// steady commits one event after the other at its time. What a slow database has not committed
// shortly after the end is left out.
func (p *producers) steady(ctx context.Context, order loadOrder) (ids, committed []int64, err error) {
	ids, committed = make([]int64, order.Events), make([]int64, order.Events)
	until := time.Now().Add(order.For + late)
	_, err = measure.Open(ctx, connections, order.Events, order.Rate, func(ctx context.Context, n int) (err error) {
		if time.Now().After(until) {
			return nil
		}
		if ids[n], err = p.insert(ctx, order.First+n); err == nil {
			committed[n] = time.Now().UnixNano()
		}
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	none := func(value int64) bool { return value == 0 }
	if ids, committed = slices.DeleteFunc(ids, none), slices.DeleteFunc(committed, none); len(ids) == 0 {
		return nil, nil, errors.New("no event was committed in time")
	}
	return ids, committed, nil
}

// startLoad starts the process of LoadCommand.
func startLoad(ctx context.Context, inv *cli.Invocation) (*measure.Process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	cmd := exec.CommandContext(ctx, self, "bench-load")
	cmd.Env = inv.Env
	load, err := measure.Start(cmd)
	if err != nil {
		return nil, fmt.Errorf("start producers: %w", err)
	}
	return load, nil
}
