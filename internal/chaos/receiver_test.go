package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/inbox"
)

const receiverTables = `
CREATE TABLE effects (
    id  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key text NOT NULL, -- not unique: a doubled effect must show
    at  timestamptz NOT NULL DEFAULT now(),
    early boolean NOT NULL DEFAULT false -- of a receiver that records events: an earlier one of the ordering key was not done
)`

const insertEffect = `INSERT INTO effects (key) VALUES ($1)`

// In the environment of a receiver's process.
const (
	receiverDatabase = "CHAOS_RECEIVER_DATABASE"
	receiverSecret   = "CHAOS_RECEIVER_SECRET"
	receiverRecords  = "CHAOS_RECEIVER_RECORDS" // not empty: it records events, and works them later
)

// receive is a receiving service as a user writes it. It prints where it listens, and serves until
// it is killed, or told to end by SIGTERM.
func receive() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	pool, err := pgxpool.New(context.Background(), os.Getenv(receiverDatabase))
	if err != nil {
		return err
	}
	defer pool.Close()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	cfg := consumer.Config{Receiver: "chaos", Secrets: []string{os.Getenv(receiverSecret)}}
	var handler http.Handler
	var working sync.WaitGroup
	failed := make(chan error, 2)
	if os.Getenv(receiverRecords) == "" {
		handler, err = consumer.New(pool, cfg, writeEffect)
	} else {
		var in *inbox.Inbox
		if in, err = inbox.New(pool, inbox.Config{Config: cfg, Handle: workEvent, Schedule: schedule, MaxAttempts: 50}); err == nil {
			handler = in.Handler()
			working.Go(func() {
				if err := in.Run(ctx); err != nil {
					failed <- err
				}
			})
		}
	}
	if err != nil {
		return err
	}
	fmt.Println(listener.Addr())
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	go func() { failed <- server.Serve(listener) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
		err := server.Shutdown(context.Background())
		working.Wait()
		return err
	}
}

// writeEffect is the handler: it writes the effect of an event.
func writeEffect(ctx context.Context, tx pgx.Tx, event consumer.Event) error {
	var sold payload // another event's under this key must show
	if err := json.Unmarshal(event.Payload, &sold); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, insertEffect, sold.Key)
	return err
}
