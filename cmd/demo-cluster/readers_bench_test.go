package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/outbox-relay/outbox-relay/internal/process"
	"github.com/outbox-relay/outbox-relay/internal/testkit"
)

var readerEvents = flag.Int("reader-events", 6_000, "events that each number of readers works in BenchmarkReaders")

// BenchmarkReaders measures how many effects a second 1, 2, 3 and 6 reader processes have together,
// over 16 partitions of a stream of three servers and of a topic of kfake, with a handler that
// writes one row. PostgreSQL writes to the disk at each commit. Run it with -benchtime 1x.
func BenchmarkReaders(b *testing.B) {
	for _, log := range []string{"nats", "kafka"} {
		b.Run(log, func(b *testing.B) {
			s := newStage(&options{
				Relay: "../../bin/outbox-relay", Root: "../..", Log: log, Events: *readerEvents, Keys: 1000, Partitions: 16, Durable: true, Patience: 2 * time.Minute,
			})
			b.Cleanup(func() { testkit.Must(b, s.close()) })
			testkit.Must(b, s.open(b.Context()))
			testkit.Must(b, s.fill(b.Context()))
			for _, readers := range []int{1, 2, 3, 6} {
				b.Run(fmt.Sprintf("readers=%d", readers), func(b *testing.B) {
					for i := range b.N {
						s.Receiver = fmt.Sprintf("readers-%d-%d", readers, i) // which has read nothing yet
						whole, middle, err := s.read(b.Context(), readers)
						testkit.Must(b, err)
						b.ReportMetric(whole, "effects/s")
						b.ReportMetric(middle, "middle-effects/s")
					}
				})
			}
		})
	}
}

// fill has a relay carry the events to the log.
func (s *stage) fill(ctx context.Context) error {
	if _, err := s.finance.Exec(ctx, `INSERT INTO outbox_route VALUES ('*', 'log')`); err != nil {
		return err
	}
	if _, err := s.finance.Exec(ctx, `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key)
		SELECT 'invoice.issued', json_build_object('invoice', i), 'invoice-' || i, 'customer ' || i % $2 FROM generate_series(1, $1) i`, s.Events, s.Keys); err != nil {
		return err
	}
	if err := s.configure(); err != nil {
		return err
	}
	defer os.Remove(s.config)
	relay, err := process.Start(s.relay())
	if err != nil {
		return err
	}
	defer relay.Stop(s.Grace)
	return s.Poll(s.Patience, "the deliveries", func(ctx context.Context) (bool, error) {
		return process.One[bool](ctx, s.finance, `SELECT NOT EXISTS (SELECT FROM outbox_delivery WHERE status <> 'delivered')`)
	})
}

// read has a number of readers work all events, and returns the effects per second from the first
// to the last one, and of the 80 % in the middle, in which all readers have begun and none has
// ended.
func (s *stage) read(ctx context.Context, readers int) (whole, middle float64, err error) {
	if _, err := s.ship.Exec(ctx, `TRUNCATE shipments`); err != nil {
		return 0, 0, err
	}
	for range readers {
		p, err := process.Start(s.consumer(func(string) {}))
		if err != nil {
			return 0, 0, err
		}
		defer p.Kill()
	}
	if err := s.Poll(s.Patience, "the effects", func(ctx context.Context) (bool, error) {
		return process.One[bool](ctx, s.ship, `SELECT count(*) >= $1 FROM shipments`, s.Events)
	}); err != nil {
		return 0, 0, err
	}
	err = s.ship.QueryRow(ctx, `SELECT count(*) / extract(epoch FROM max(at) - min(at))::float8,
		0.8 * count(*) / extract(epoch FROM percentile_disc(0.9) WITHIN GROUP (ORDER BY at) - percentile_disc(0.1) WITHIN GROUP (ORDER BY at))::float8
		FROM shipments`).Scan(&whole, &middle)
	return whole, middle, err
}
