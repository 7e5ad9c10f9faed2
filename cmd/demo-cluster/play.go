package main

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/time/rate"

	"github.com/outbox-relay/outbox-relay/internal/localnats"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/outbox"
)

const (
	stream  = "OUTBOX"
	subject = "outbox.{partition}.>"
)

// stage is what the play takes place on.
type stage struct {
	*options
	postgres *localpg.Server
	cluster  *localnats.Cluster
	js       jetstream.JetStream
	finance  *pgxpool.Pool
	ship     *pgxpool.Pool
	config   string // the relay's
	self     string

	calm         chan struct{} // closed when the last event is committed
	results      sync.Map      // of consumers, by consumer.Result: *atomic.Int64
	leaderKills  atomic.Int64
	relayKills   atomic.Int64
	consumerEnds atomic.Int64
}

// play runs the demonstration and fails when a promise is broken.
func (o *options) play(ctx context.Context) error {
	s := &stage{options: o, calm: make(chan struct{})}
	err := s.open(ctx)
	if err == nil {
		err = s.run(ctx)
	}
	return errors.Join(err, s.close())
}

// open starts PostgreSQL and the cluster.
func (s *stage) open(ctx context.Context) (err error) {
	var secret [32]byte
	_, _ = rand.Read(secret[:]) // never fails
	s.Secret = "whsec_" + base64.StdEncoding.EncodeToString(secret[:])
	if s.self, err = os.Executable(); err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	if s.Relay, err = filepath.Abs(s.Relay); err != nil {
		return fmt.Errorf("find outbox-relay: %w", err)
	}
	fmt.Println("starting PostgreSQL and three NATS servers")
	if s.postgres, err = localpg.Start(ctx, localpg.Options{}); err != nil {
		return err
	}
	if s.finance, err = s.database(ctx, "finance", "outbox", ""); err != nil {
		return err
	}
	if s.ship, err = s.database(ctx, "logistics", "inbox",
		`CREATE TABLE shipments (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, idempotency_key text, ordering_key text, sequence bigint)`); err != nil {
		return err
	}
	program, err := localnats.Find(s.Root)
	if err != nil {
		return err
	}
	if s.cluster, err = localnats.Start(ctx, program, 3, ""); err != nil {
		return err
	}
	conn, err := nats.Connect(s.cluster.URL(), nats.MaxReconnects(-1), nats.ReconnectWait(100*time.Millisecond))
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if s.js, err = jetstream.New(conn); err != nil {
		return fmt.Errorf("open JetStream: %w", err)
	}
	return s.createStream(ctx)
}

// createStream makes the stream as soon as the cluster has a leader.
func (s *stage) createStream(ctx context.Context) error {
	var err error
	for range 30 {
		// A request that arrives before there is a leader gets no answer at all.
		asking, cancel := context.WithTimeout(ctx, time.Second)
		_, err = s.js.CreateStream(asking, jetstream.StreamConfig{Name: stream, Subjects: []string{"outbox.>"}, Replicas: 3, Duplicates: 2 * time.Minute})
		cancel()
		if err == nil || ctx.Err() != nil {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("create stream: %w", err)
	}
	return nil
}

// database makes one with a set of migrations, as a user would.
func (s *stage) database(ctx context.Context, name, set, tables string) (*pgxpool.Pool, error) {
	if err := s.postgres.CreateDatabase(ctx, name, ""); err != nil {
		return nil, err
	}
	if err := process.Run(ctx, process.Command{Argv: []string{s.Relay, "migrate", "up", "--set", set}, Env: []string{"OUTBOX_DATABASE_URL=" + s.postgres.DSN(name)}}); err != nil {
		return nil, fmt.Errorf("outbox-relay migrate up --set %s: %w", set, err)
	}
	pool, err := pgxpool.New(ctx, s.postgres.DSN(name))
	if err != nil {
		return nil, fmt.Errorf("open database %s: %w", name, err)
	}
	_, err = pool.Exec(ctx, tables)
	return pool, err
}

// run plays: events, deaths, and the check.
func (s *stage) run(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "demo-cluster-")
	if err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	defer os.RemoveAll(dir)
	s.config = filepath.Join(dir, "outbox-relay.yaml")
	text := fmt.Sprintf("routes:\n  - {event: \"*\", to: [log]}\ndestinations:\n  log:\n    url: %s\n    subject: outbox.{partition}.{type}\n    partitions: %d\n"+
		"    stream: %s\n    signing_secrets: [%s]\n    timeout: 5s\n", s.cluster.URL(), partitions, stream, s.Secret)
	if err := os.WriteFile(s.config, []byte(text), 0o600); err != nil {
		return fmt.Errorf("write the relay's configuration: %w", err)
	}

	playing, end := context.WithCancelCause(ctx)
	defer end(nil)
	var actors sync.WaitGroup
	act := func(f func(context.Context) error) {
		actors.Go(func() {
			if err := f(playing); err != nil && playing.Err() == nil {
				end(err)
			}
		})
	}
	act(func(ctx context.Context) error { return s.keepRelay(ctx) })
	for i := range 3 {
		act(func(ctx context.Context) error { return s.keepConsumer(ctx, i) })
	}
	act(s.killLeaders)
	began := time.Now()
	err = s.produce(playing)
	close(s.calm)
	if err == nil {
		fmt.Printf("%d events are committed, after %v\n", s.Events, time.Since(began).Round(time.Second))
		err = s.await(playing)
	}
	took := time.Since(began)
	if cause := context.Cause(playing); cause != nil && err != nil {
		err = cause
	}
	end(nil)
	actors.Wait()
	if err != nil {
		return err
	}
	return s.check(ctx, took)
}

// produce commits the events, those of each key one after the other.
func (s *stage) produce(ctx context.Context) error {
	pace := rate.NewLimiter(rate.Inf, 0)
	if s.Rate > 0 {
		pace = rate.NewLimiter(rate.Limit(s.Rate), 1)
	}
	const workers = 4
	var producing sync.WaitGroup
	errs := make([]error, workers)
	for w := range workers {
		producing.Go(func() {
			for n := w; n < s.Events && errs[w] == nil; n += workers {
				if errs[w] = pace.Wait(ctx); errs[w] == nil {
					errs[w] = s.commit(ctx, n)
				}
			}
		})
	}
	producing.Wait()
	return errors.Join(errs...)
}

func (s *stage) commit(ctx context.Context, n int) error {
	event, err := outbox.NewEvent("invoice.issued", fmt.Sprintf("invoice-%06d", n), map[string]int{"invoice": n})
	if err != nil {
		return err
	}
	event.OrderingKey = fmt.Sprintf("customer %d", n%s.Keys)
	tx, err := s.finance.Begin(ctx)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // after a commit it does nothing
	if _, err := outbox.Enqueue(ctx, tx, event); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// await waits until every event has had its effect, or something else has gone wrong.
func (s *stage) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, s.Patience, errors.New("not all events had their effect in time"))
	defer cancel()
	for {
		var done int
		if err := s.ship.QueryRow(ctx, `SELECT count(DISTINCT idempotency_key) FROM shipments`).Scan(&done); err != nil {
			return err
		}
		if done >= s.Events {
			return nil
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			var waiting string
			_ = s.finance.QueryRow(context.WithoutCancel(ctx), `SELECT coalesce(string_agg(DISTINCT concat(event_id, ' ', ordering_key, ' ', status, ' claim ', claim, ' attempts ', attempts, ' rescues ', rescues, ' next ', next_attempt_at, ' lease ', lease_expires_at, ' ', last_reason, ' ', last_error), E'\n'), '') FROM outbox_delivery WHERE status <> 'delivered'`).Scan(&waiting)
			return fmt.Errorf("%w: %d of %d; not delivered: %s", context.Cause(ctx), done, s.Events, waiting)
		}
	}
}

// close ends what was started.
func (s *stage) close() error {
	var errs []error
	for _, pool := range []*pgxpool.Pool{s.finance, s.ship} {
		if pool != nil {
			pool.Close()
		}
	}
	if s.js != nil {
		s.js.Conn().Close()
	}
	if s.cluster != nil {
		errs = append(errs, s.cluster.Stop())
	}
	if s.postgres != nil {
		errs = append(errs, s.postgres.Stop())
	}
	return errors.Join(errs...)
}
