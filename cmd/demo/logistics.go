package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/webhook"
)

// logisticsRole is the receiving service: it ships what finance has invoiced, once, whatever happens to it.
type logisticsRole struct {
	Database string `required:"" help:"URL of its database."`
	Listen   string `default:"127.0.0.1:0" help:"Address to listen on."`
	Secret   string `required:"" env:"DEMO_SECRET" help:"Signing secret."`
	Seed     uint64 `help:"Seed of the faults."`
	faults   `embed:""`
	DieAfter int64 `help:"Die in this effect: after its commit, before its answer. 0: never."`
}

// webhookPath is where logistics takes finance's events. The query names the relay that sends, for the journal alone.
const webhookPath = "/webhooks/finance"

func (role *logisticsRole) Run(ctx context.Context) error {
	cfg, err := pgxpool.ParseConfig(role.Database)
	if err != nil {
		return fmt.Errorf("read database URL: %w", err)
	}
	cfg.MaxConns = 16
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return fmt.Errorf("open database: %w", err)
	}
	defer pool.Close()

	r := &receiver{role: role, journal: &journal{w: os.Stdout}}
	if r.inner, err = consumer.New(pool, consumer.Config{Receiver: "logistics", Secrets: []string{role.Secret}}, ship); err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("POST "+webhookPath, r)

	behave := make(chan os.Signal, 1)
	signal.Notify(behave, syscall.SIGUSR1)
	go func() {
		for range behave {
			r.behaves.Store(true)
			r.journal.write(entry{Op: opBehaving})
		}
	}()

	listener, err := listen(ctx, role.Listen)
	if err != nil {
		return err
	}
	r.journal.write(entry{Op: opReady, Addr: listener.Addr().String()})
	return (&http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}).Serve(listener)
}

// listen tries again for a while: when a receiver comes back to its port, a client's connection may just be using it.
func listen(ctx context.Context, addr string) (net.Listener, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
		if err == nil {
			return listener, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("listen: %w", err)
		}
	}
}

// insertShipment is the effect. The table has no unique key on purpose: one that happens twice must show.
const insertShipment = `INSERT INTO shipments (invoice, customer, idempotency_key) VALUES ($1, $2, $3)`

// ship is the handler that a user of package consumer writes: one transaction, no thought of duplicates.
func ship(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
	var invoice invoice
	if err := json.Unmarshal(event.Payload, &invoice); err != nil {
		return consumer.Permanent(errors.New("the payload is no invoice"))
	}
	if _, err := tx.Exec(ctx, insertShipment, invoice.Number, invoice.Customer, event.Key); err != nil {
		return fmt.Errorf("write shipment: %w", err)
	}
	if ctx.Value(refuseKey{}) != nil {
		return errors.New("out of cardboard")
	}
	return nil
}

// refuseKey in a context makes ship fail after its work.
type refuseKey struct{}

// receiver stands around the middleware, where a network would: it keeps the journal and causes the faults.
type receiver struct {
	role    *logisticsRole
	journal *journal
	inner   http.Handler

	behaves atomic.Bool // no more faults
	number  atomic.Int64
	effects atomic.Int64
}

func (rc *receiver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	delivery := r.Header.Get(webhook.DeliveryID)
	a := &answer{ResponseWriter: w, receiver: rc, number: int(rc.number.Add(1))}
	if !rc.behaves.Load() {
		a.fault, a.late = rc.role.pick(rc.role.Seed, delivery)
	}
	attempt, _ := strconv.Atoi(r.Header.Get(webhook.Attempt)) // a fake one is for the checker to find
	rc.journal.write(entry{
		Op: opRequest, Number: a.number, Key: r.Header.Get(webhook.IdempotencyKey), Attempt: attempt, Delivery: delivery,
		Relay: r.URL.Query().Get("relay"), Fault: a.fault,
	})
	a.gone = r.Context()
	if a.fault == faultRefuse {
		r = r.WithContext(context.WithValue(r.Context(), refuseKey{}, true))
	}
	rc.inner.ServeHTTP(a, r)
	if a.lost {
		panic(http.ErrAbortHandler) // closes the connection without an answer
	}
}

// answer is the writer that the middleware answers to. Its first WriteHeader is the moment after COMMIT and before the
// answer.
type answer struct {
	http.ResponseWriter
	receiver *receiver
	number   int
	fault    fault
	late     time.Duration
	gone     context.Context // done when the caller has hung up

	status int
	lost   bool
}

func (a *answer) WriteHeader(status int) {
	if a.status != 0 {
		return
	}
	a.status = status
	replayed := a.Header().Get(webhook.Replayed) != ""
	rc := a.receiver
	rc.journal.write(entry{Op: opAnswer, Number: a.number, Status: status, Replayed: replayed})
	success := status >= 200 && status <= 299
	if success && !replayed && rc.effects.Add(1) == rc.role.DieAfter && !rc.behaves.Load() {
		rc.journal.write(entry{Op: opDying})
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // until the kernel gets round to it
	}
	switch {
	case a.fault == faultLose && success:
		a.lost = true
		return
	case a.fault == faultLate:
		select {
		case <-time.After(a.late):
		case <-a.gone.Done():
		}
	}
	a.ResponseWriter.WriteHeader(status)
}

func (a *answer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	if a.lost {
		return 0, errors.New("the answer is lost")
	}
	return a.ResponseWriter.Write(p)
}
