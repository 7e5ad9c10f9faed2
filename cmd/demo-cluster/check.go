package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
)

// A pair of effects of one key in the wrong order, and effects that are one too many.
const (
	selectLost = `SELECT $1 - count(DISTINCT idempotency_key), count(*) - count(DISTINCT idempotency_key) FROM shipments`

	selectReordered = `SELECT count(*) FROM (
    SELECT sequence < lag(sequence) OVER (PARTITION BY ordering_key ORDER BY id) AS earlier FROM shipments) s WHERE earlier`

	selectAttempts = `SELECT count(*) FILTER (WHERE status = 'delivered'), coalesce(sum(attempts), 0) FROM outbox_delivery`
)

// check compares the databases and the log, and prints what the play came to.
func (s *stage) check(ctx context.Context, took time.Duration) error {
	var lost, doubled, reordered, delivered, attempts int
	if err := s.ship.QueryRow(ctx, selectLost, s.Events).Scan(&lost, &doubled); err != nil {
		return err
	}
	if err := s.ship.QueryRow(ctx, selectReordered).Scan(&reordered); err != nil {
		return err
	}
	if err := s.finance.QueryRow(ctx, selectAttempts).Scan(&delivered, &attempts); err != nil {
		return err
	}
	stored, err := s.log.stored(ctx)
	if err != nil {
		return err
	}
	row := func(what string, figure any, remark string) { fmt.Printf("  %-38s %8v   %s\n", what, figure, remark) }
	fmt.Println("\nWhat happened")
	row("events committed", s.Events, fmt.Sprintf("of %d ordering keys, in %v", s.Keys, took.Round(time.Second)))
	what, kills, remark := s.log.disturbed()
	row(what, kills, remark)
	row("relays killed", s.relayKills.Load(), "")
	row("consumers killed", s.consumerEnds.Load(), "every second one after its commit, before its acknowledgement")
	row("messages in the log", stored, fmt.Sprintf("%d more than events: attempts whose outcome was not known, made again", stored-s.Events))
	row("attempts of the relay", attempts, "that it knows of; a relay that was killed does not count its last ones")
	row("duplicates suppressed by consumers", s.counted(consumer.ResultDuplicate), "delivered again after a lost acknowledgement")
	row("met while another one worked them", s.counted(consumer.ResultInFlight), "")
	row("effects", s.Events-lost+doubled, "")
	row("lost", lost, "")
	row("doubled", doubled, "")
	row("out of order", reordered, "effects before one of an earlier event of their key")
	fmt.Println()
	if lost != 0 || doubled != 0 || reordered != 0 {
		return errors.New("a promise is broken")
	}
	fmt.Println("nothing lost, nothing doubled, every key in its order")
	return nil
}

func (s *stage) counted(result consumer.Result) int64 {
	n, ok := s.results.Load(string(result))
	if !ok {
		return 0
	}
	return n.(*atomic.Int64).Load()
}
