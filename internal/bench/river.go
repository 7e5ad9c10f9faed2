package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// riverQueue is River, whose workers post what outbox-relay would.
type riverQueue struct{ tuned bool }

// riverWorkers is what River's own documentation gives a queue.
const riverWorkers = 100

// riverArgs are the arguments of a job. They are the payload of the request, as River stores it.
type riverArgs struct {
	N           int    `json:"n"`
	Destination int    `json:"d"`
	Pad         string `json:"pad"`
}

// Kind names the kind of job, as River asks for.
func (riverArgs) Kind() string { return "event" }

const unsettledRiver = `SELECT EXISTS (SELECT FROM river_job WHERE state IN ('available', 'running', 'retryable', 'scheduled'))`

func (riverQueue) unsettled() string { return unsettledRiver }

func (riverQueue) prepare(ctx context.Context, _ *rig, db *database, _ load) error {
	migrator, err := rivermigrate.New(riverpgxv5.New(db.pool), &rivermigrate.Config{Logger: silent()})
	if err != nil {
		return fmt.Errorf("migrate River: %w", err)
	}
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	return err
}

func (s riverQueue) fill(ctx context.Context, db *database, l load, first, count int) error {
	client, err := s.client(db.pool)
	if err != nil {
		return err
	}
	const batch = 10_000
	for done := 0; done < count; done += batch {
		var jobs []river.InsertManyParams
		for n := first + done; n < first+min(done+batch, count); n++ {
			jobs = append(jobs, river.InsertManyParams{Args: riverArgs{N: n, Destination: n % l.destinations, Pad: padding(l.payload)}})
		}
		if _, err := client.InsertManyFast(ctx, jobs); err != nil {
			return fmt.Errorf("fill River: %w", err)
		}
	}
	return nil
}

func (s riverQueue) producer(pool *pgxpool.Pool, l load) (func(ctx context.Context, n int) error, error) {
	client, err := s.client(pool)
	if err != nil {
		return nil, err
	}
	pad := padding(l.payload)
	return func(ctx context.Context, n int) error {
		_, err := client.Insert(ctx, riverArgs{N: n, Pad: pad}, nil)
		return err
	}, nil
}

func (s riverQueue) start(ctx context.Context, r *rig, db *database, l load) ([]*process, error) {
	p := r.peer(db, l)
	p.InFlight = riverWorkers
	if s.tuned {
		p.InFlight, p.Cooldown = inFlight, riverCooldown
	}
	return r.startPeer(ctx, "river", p)
}

// client returns a client that only inserts.
func (s riverQueue) client(pool *pgxpool.Pool) (*river.Client[pgx.Tx], error) {
	config := &river.Config{Logger: silent()}
	if s.tuned {
		config.FetchCooldown = riverCooldown // it notifies the workers no more often than this
	}
	return river.NewClient(riverpgxv5.New(pool), config)
}

func silent() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// riverWorker posts the arguments of a job.
type riverWorker struct {
	river.WorkerDefaults[riverArgs]
	peer *peer
}

// Work posts one event. A failure makes River try it again.
func (w *riverWorker) Work(ctx context.Context, job *river.Job[riverArgs]) error {
	return w.peer.post(ctx, event{
		id: job.ID, key: "k-" + strconv.Itoa(job.Args.N), destination: job.Args.Destination, body: job.EncodedArgs,
	})
}

// playRiver works the jobs until its input ends.
func playRiver(ctx context.Context, p *peer) error {
	config, err := pgxpool.ParseConfig(p.DSN)
	if err != nil {
		return err
	}
	if p.Cooldown > 0 {
		config.MaxConns = 16 // as many as fit onto two processors, and more than its batches need
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	workers := river.NewWorkers()
	river.AddWorker(workers, &riverWorker{peer: p})
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Logger: silent(), Workers: workers, FetchCooldown: p.Cooldown,
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: p.InFlight}},
	})
	if err != nil {
		return fmt.Errorf("start River: %w", err)
	}
	if err := client.Start(ctx); err != nil {
		return fmt.Errorf("start River: %w", err)
	}
	err = untilEnd(ctx, func(context.Context) error { return nil })
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = client.StopAndCancel(stopping) // what it was working on does not count any more
	return err
}
