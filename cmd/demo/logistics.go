package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
)

// logisticsRole is the receiving service: it ships what finance has invoiced, once.
type logisticsRole struct {
	Database string `required:"" help:"URL of its database."`
	Listen   string `default:"127.0.0.1:0" help:"Address to listen on, which it prints."`
	Secret   string `required:"" env:"DEMO_SECRET" help:"Signing secret."`
	DieAfter int64  `help:"Die in this effect: after its commit, before its answer. 0: never."`
}

// webhookPath is where logistics takes finance's events.
const webhookPath = "/webhooks/finance"

func (role *logisticsRole) Run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, role.Database)
	if err != nil {
		return fmt.Errorf("open database: %w", err)
	}
	defer pool.Close()
	var effects atomic.Int64
	receive, err := consumer.New(pool, consumer.Config{
		Receiver: logisticsName, Secrets: []string{role.Secret},
		Observe: func(_ context.Context, report consumer.Report) { // after the commit, before the answer
			if report.Result == consumer.ResultProcessed && effects.Add(1) == role.DieAfter {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {} // until the kernel gets round to it
			}
		},
	}, ship)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+webhookPath, func(w http.ResponseWriter, r *http.Request) {
		receive.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), refuseKey{}, r.Header.Get(refuseHeader) != "")))
	})
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", role.Listen)
	if err != nil {
		return err
	}
	fmt.Println(listener.Addr())
	return (&http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}).Serve(listener)
}

// insertShipment is the effect. The table has no unique key: a doubled effect must show.
const insertShipment = `INSERT INTO shipments (invoice, customer, idempotency_key) VALUES ($1, $2, $3)`

// ship is the handler that a user of package consumer writes, without a thought of duplicates.
func ship(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
	var invoice invoice
	if err := json.Unmarshal(event.Payload, &invoice); err != nil {
		return consumer.Permanent(errors.New("the payload is no invoice"))
	}
	if _, err := tx.Exec(ctx, insertShipment, invoice.Number, invoice.Customer, event.IdempotencyKey); err != nil {
		return fmt.Errorf("write shipment: %w", err)
	}
	if ctx.Value(refuseKey{}) == true {
		return errors.New("out of cardboard")
	}
	return nil
}

// refuseKey in a context, with true, makes ship fail after its work.
type refuseKey struct{}
