package relay_test

import (
	"context"
	"log"
	"os"
	"os/signal"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/relay"
)

// A program runs a relay within itself instead of beside itself. The database has been migrated.
func Example() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	pool, err := pgxpool.ParseConfig(os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	secret, err := relay.ParseSecret(os.Getenv("WEBHOOK_SECRET"))
	if err != nil {
		log.Fatal(err)
	}
	r, err := relay.New(relay.Config{
		Pool: pool,
		Destinations: []relay.Destination{{
			Name: "billing", URL: "https://billing.example.com/events", SigningSecrets: []relay.Secret{secret},
			Retry: relay.Retry{NotAfter: 24 * time.Hour}, OnFailure: relay.Skip,
		}},
		Routes:    []relay.Route{{Event: "invoice.*", To: []string{"billing"}}},
		Alerts:    relay.Alerts{Channels: []relay.Channel{relay.Slack(os.Getenv("SLACK_WEBHOOK_URL"), relay.Egress{})}},
		Retention: relay.Retention{ArchiveAfter: 7 * 24 * time.Hour, Schedule: "17 3 * * *"},
		History:   relay.NewHistory(),
		Hooks: relay.Hooks{Settled: func(destination string, outcome relay.Outcome, reason relay.Reason, deliveries int) {
			log.Print(destination, outcome, reason, deliveries)
		}},
	})
	if err != nil {
		log.Fatal(err) // it names each mistake
	}
	if err := r.Run(ctx); err != nil {
		log.Fatal(err)
	}
}
