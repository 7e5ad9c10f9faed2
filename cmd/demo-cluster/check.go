package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/outbox-relay/outbox-relay/consumer"
	"github.com/outbox-relay/outbox-relay/internal/process"
)

// A pair of effects of one key in the wrong order, and effects that are one too many.
const (
	selectLost = `SELECT $1 - count(DISTINCT idempotency_key), count(*) - count(DISTINCT idempotency_key) FROM shipments`

	selectReordered = `SELECT count(*) FROM (
    SELECT sequence < lag(sequence) OVER (PARTITION BY ordering_key ORDER BY id) AS earlier FROM shipments) s WHERE earlier`

	selectAttempts = `SELECT coalesce(sum(attempts), 0)::bigint FROM outbox_delivery`
)

// check compares the databases and the log, and prints what the play came to.
func (s *stage) check(ctx context.Context, took time.Duration) error {
	var lost, doubled int
	err := s.ship.QueryRow(ctx, selectLost, s.Events).Scan(&lost, &doubled)
	reordered, reorderedErr := process.One[int](ctx, s.ship, selectReordered)
	attempts, attemptsErr := process.One[int](ctx, s.finance, selectAttempts)
	stored, storedErr := s.log.stored(ctx)
	if err := errors.Join(err, reorderedErr, attemptsErr, storedErr); err != nil {
		return err
	}
	what, kills, remark := s.log.disturbed()
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	process.PrintTable(os.Stdout, [][3]string{
		{"events committed", strconv.Itoa(s.Events), fmt.Sprintf("of %d ordering keys, in %v", s.Keys, took.Round(time.Second))},
		{what, number(kills), remark},
		{"relays killed", number(s.relayKills.Load()), ""},
		{"consumers killed", number(s.consumerEnds.Load()), "every second one after its commit, before its acknowledgement"},
		{"messages in the log", strconv.Itoa(stored), fmt.Sprintf("%d more than events: attempts whose outcome was not known, made again", stored-s.Events)},
		{"attempts of the relay", strconv.Itoa(attempts), "that it knows of; a relay that was killed does not count its last ones"},
		{"duplicates suppressed by consumers", strconv.Itoa(s.results[consumer.ResultDuplicate]), "delivered again after a lost acknowledgement"},
		{"met while another one worked them", strconv.Itoa(s.results[consumer.ResultInFlight]), ""},
		{"effects", strconv.Itoa(s.Events - lost + doubled), ""},
		{"lost", strconv.Itoa(lost), ""},
		{"doubled", strconv.Itoa(doubled), ""},
		{"out of order", strconv.Itoa(reordered), "effects before one of an earlier event of their key"},
	})
	if lost != 0 || doubled != 0 || reordered != 0 {
		return errors.New("a promise is broken")
	}
	fmt.Println("\nnothing lost, nothing doubled, every key in its order")
	return nil
}
