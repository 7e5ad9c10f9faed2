package main

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/time/rate"

	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/outbox"
)

// An eventLog carries the events. Its methods are for one goroutine at a time.
type eventLog interface {
	// open starts the servers, and makes a stream or topic.
	open(ctx context.Context) error
	// url returns what clients connect to, and settings what else the relay's destination needs, as YAML.
	url() string
	settings() string
	// disturb kills servers and starts them again; disturbed returns what that is called, and how often it happened.
	disturb(ctx context.Context) error
	disturbed() (what string, n int64, remark string)
	// stored returns how many messages there are.
	stored(ctx context.Context) (int, error)
	// close ends what open has started, also after an error.
	close() error
}

// stage is what the play takes place on.
type stage struct {
	*options
	postgres *localpg.Server
	log      eventLog
	finance  *pgxpool.Pool
	ship     *pgxpool.Pool
	config   string // the relay's
	self     string

	calm         chan struct{} // closed when the last event is committed
	results      sync.Map      // of consumers, by consumer.Result: *atomic.Int64
	relayKills   atomic.Int64
	consumerEnds atomic.Int64
}

// play runs the demonstration and fails when a promise is broken.
func (o *options) play(ctx context.Context) error {
	s := newStage(o)
	err := s.open(ctx)
	if err == nil {
		err = s.run(ctx)
	}
	return errors.Join(err, s.close())
}

func newStage(o *options) *stage {
	s := &stage{options: o, calm: make(chan struct{}), log: &overNATS{options: o}}
	if o.Log == "kafka" {
		s.log = &overKafka{options: o}
	}
	return s
}

// open starts PostgreSQL and the log.
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
	fmt.Println("starting PostgreSQL")
	if s.postgres, err = localpg.Start(ctx, localpg.Options{Durable: s.Durable}); err != nil {
		return err
	}
	if s.finance, err = s.database(ctx, "finance", "outbox", ""); err != nil {
		return err
	}
	if s.ship, err = s.database(ctx, "logistics", "inbox",
		`CREATE TABLE shipments (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, idempotency_key text, ordering_key text, sequence bigint,
			at timestamptz DEFAULT clock_timestamp())`); err != nil {
		return err
	}
	return s.log.open(ctx)
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
	if err := s.configure(); err != nil {
		return err
	}
	defer os.Remove(s.config)
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
	act(s.disturbLog)
	began := time.Now()
	err := s.produce(playing)
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

// configure writes the relay's configuration, which the caller removes.
func (s *stage) configure() error {
	file, err := os.CreateTemp("", "demo-cluster-*.yaml")
	if err != nil {
		return fmt.Errorf("make the relay's configuration: %w", err)
	}
	s.config = file.Name()
	_, err = fmt.Fprintf(file, "routes:\n  - {event: \"*\", to: [log]}\ndestinations:\n  log: {url: %q, %s, signing_secrets: [%s], timeout: 5s}\n",
		s.log.url(), s.log.settings(), s.Secret)
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("write the relay's configuration: %w", err)
	}
	return nil
}

// consumer returns the command of a consumer.
func (s *stage) consumer() []string {
	return []string{
		s.self, "--consumer", "--log", s.Log, "--url", s.log.url(), "--database", s.postgres.DSN("logistics"), "--partitions", strconv.Itoa(s.Partitions), "--receiver", s.Receiver,
	}
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
	errs = append(errs, s.log.close())
	if s.postgres != nil {
		errs = append(errs, s.postgres.Stop())
	}
	return errors.Join(errs...)
}
