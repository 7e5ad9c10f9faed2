// Command stripe records a shipment for every paid invoice that a sender that signs in its own way
// sends, in the way of Stripe.
package main

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/consumer/examples/internal/server"
)

func main() { os.Exit(server.Main(run)) }

func run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	secret := os.Getenv("STRIPE_SECRET")
	if secret == "" {
		return errors.New("set STRIPE_SECRET: with an empty one, anyone could sign")
	}
	router := consumer.NewRouter()
	consumer.HandleJSON(router, "invoice.paid", 0, ship)
	router.Handle("*", 0, leave)
	receive, err := consumer.New(pool, consumer.Config{
		Receiver:       "logistics",
		Source:         "stripe",
		Verify:         consumer.Verify{Custom: verifier(secret)},
		SenderNotAfter: 3 * 24 * time.Hour, // for as long Stripe repeats what was not accepted
	}, router.Dispatch)
	if err != nil {
		return err
	}

	mux := http.NewServeMux()
	mux.Handle("POST /webhooks/stripe", receive)
	return server.Run(ctx, mux)
}

// tolerance is how old a request may be, so that a captured one is of no use for long.
const tolerance = 5 * time.Minute

// verifier proves requests signed with secret: Stripe-Signature is "t=<Unix seconds>,v1=<HMAC>",
// with one v1 for each secret in rotation, and the HMAC covers the time and the body. The event's
// id in the body is its key.
func verifier(secret string) consumer.VerifyFunc {
	return func(header http.Header, body []byte, now time.Time) (consumer.Event, error) {
		var stamp string
		var signatures [][]byte
		for part := range strings.SplitSeq(header.Get("Stripe-Signature"), ",") {
			switch name, value, _ := strings.Cut(part, "="); name {
			case "t":
				stamp = value
			case "v1":
				if signature, err := hex.DecodeString(value); err == nil {
					signatures = append(signatures, signature)
				}
			}
		}
		seconds, err := strconv.ParseInt(stamp, 10, 64)
		if err != nil || now.Sub(time.Unix(seconds, 0)).Abs() > tolerance {
			return consumer.Event{}, errors.New("the request has no recent time")
		}
		mac := hmac.New(sha256.New, []byte(secret))
		mac.Write([]byte(stamp + "."))
		mac.Write(body)
		want, proven := mac.Sum(nil), false
		for _, signature := range signatures {
			proven = proven || hmac.Equal(signature, want)
		}
		if !proven {
			return consumer.Event{}, errors.New("no signature is of this secret")
		}

		var envelope struct {
			ID      string `json:"id"`
			Type    string `json:"type"`
			Created int64  `json:"created"`
		}
		if err := json.Unmarshal(body, &envelope); err != nil {
			return consumer.Event{}, fmt.Errorf("decode event: %w", err)
		}
		return consumer.Event{IdempotencyKey: envelope.ID, Type: envelope.Type, CreatedAt: time.Unix(envelope.Created, 0)}, nil
	}
}

// paid is what this receiver reads of invoice.paid.
type paid struct {
	Data struct {
		Object struct {
			Number string `json:"number"`
			Cents  int64  `json:"amount_paid"`
		} `json:"object"`
	} `json:"data"`
}

func ship(ctx context.Context, tx pgx.Tx, _ consumer.Event, payload paid) error {
	invoice := payload.Data.Object
	_, err := tx.Exec(ctx,
		"INSERT INTO shipments (invoice, total) VALUES ($1, $2::bigint / 100.0)", invoice.Number, invoice.Cents)
	if err != nil {
		return fmt.Errorf("record shipment: %w", err) // rolls back; Stripe tries again
	}
	return nil
}

// leave accepts what is of no concern, lest Stripe repeats it for days.
func leave(context.Context, pgx.Tx, consumer.Event) error {
	return consumer.Ignore("shipping waits for paid invoices only")
}
