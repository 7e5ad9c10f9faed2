package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/time/rate"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/localpg"
	"github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/outbox"
)

// An eventLog carries the events. Its methods are for one goroutine at a time.
type eventLog interface {
	// open starts the servers, and makes a stream or topic.
	open(ctx context.Context) error
	// url returns what clients connect to, and settings what else the relay's destination needs, as
	// YAML.
	url() string
	settings() string
	// disturb kills servers and starts them again; disturbed returns what that is called, and how
	// often it happened.
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
	*process.Stage
	log     eventLog
	finance *pgxpool.Pool
	ship    *pgxpool.Pool
	config  string // the relay's

	calm         chan struct{} // closed when the last event is committed
	relayKills   atomic.Int64
	consumerEnds atomic.Int64

	mu      sync.Mutex // guards results
	results map[consumer.Result]int
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
	s := &stage{options: o, calm: make(chan struct{}), log: &overNATS{options: o}, results: map[consumer.Result]int{}}
	if o.Log == "kafka" {
		s.log = &overKafka{options: o}
	}
	return s
}

const shipments = `
CREATE TABLE shipments (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, idempotency_key text, ordering_key text, sequence bigint, at timestamptz DEFAULT clock_timestamp()
)`

// open starts PostgreSQL and the log.
func (s *stage) open(ctx context.Context) (err error) {
	fmt.Println("starting PostgreSQL")
	if s.Stage, err = process.OpenStage(ctx, s.options.Relay, localpg.Options{Durable: s.Durable}); err != nil {
		return err
	}
	s.Grace = 30 * time.Second
	if s.finance, err = s.Stage.Database("finance", "outbox", ""); err != nil {
		return err
	}
	if s.ship, err = s.Stage.Database("logistics", "inbox", shipments); err != nil {
		return err
	}
	return s.log.open(ctx)
}

// run plays: events, deaths, and the check.
func (s *stage) run(ctx context.Context) error {
	if err := s.configure(); err != nil {
		return err
	}
	defer os.Remove(s.config)
	s.fillRelay()
	for i := range 3 {
		s.fillConsumer(i)
	}
	s.disturb(s.KillLeader, s.log.disturb)
	began := time.Now()
	err := s.produce(s.Ctx)
	close(s.calm)
	if err == nil {
		fmt.Printf("%d events are committed, after %v\n", s.Events, time.Since(began).Round(time.Second))
		err = s.await()
	}
	took := time.Since(began)
	err = s.Reason(err)
	s.End()
	if err != nil {
		return err
	}
	return s.check(ctx, took)
}

// configure writes the relay's configuration, which the caller removes. Attempts come often: the
// brokers continue refusing in the calm, when one key alone may be left to get all their faults,
// and with the standard schedule it would wait for minutes after the third.
func (s *stage) configure() error {
	file, err := os.CreateTemp("", "demo-cluster-*.yaml")
	if err != nil {
		return fmt.Errorf("make the relay's configuration: %w", err)
	}
	s.config = file.Name()
	_, err = fmt.Fprintf(file, "routes:\n  - {event: \"*\", to: [log]}\ndestinations:\n  log: {url: %q, %s, signing_secrets: [%s], timeout: 5s, retry: {schedule: [500ms, 2s], max_attempts: 50, retry_after_max: 5s}}\n",
		s.log.url(), s.log.settings(), s.Stage.Secret)
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("write the relay's configuration: %w", err)
	}
	return nil
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

const selectUndelivered = `
SELECT coalesce(string_agg(DISTINCT concat(event_id, ' ', ordering_key, ' ', status, ' claim ', claim, ' attempts ', attempts, ' rescues ', rescues,
    ' next ', next_attempt_at, ' lease ', lease_expires_at, ' ', last_reason, ' ', last_error), E'\n'), '')
FROM outbox_delivery WHERE status <> 'delivered'`

// await waits until every event has had its effect, or something else has gone wrong.
func (s *stage) await() error {
	err := s.Poll(s.Patience, "the last effect", func(ctx context.Context) (bool, error) {
		return process.One[bool](ctx, s.ship, `SELECT count(DISTINCT idempotency_key) >= $1 FROM shipments`, s.Events)
	})
	if err != nil {
		waiting, _ := process.One[string](context.WithoutCancel(s.Ctx), s.finance, selectUndelivered)
		return fmt.Errorf("%w; not delivered: %s", err, waiting)
	}
	return nil
}

// close ends what was started.
func (s *stage) close() error {
	s.End()
	return errors.Join(s.log.close(), s.Close())
}
