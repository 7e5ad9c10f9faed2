package intake

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outbox-relay/outbox-relay/internal/relaytest"
	"github.com/outbox-relay/outbox-relay/internal/testsize"
)

// A crowd is several relays that take from one outbox, and die at random.
type crowd struct {
	*room
	producing atomic.Bool
	rescues   atomic.Int64
	cuts      atomic.Int64

	mu      sync.Mutex
	seqs    map[int64]int64 // of each event: the range that it was taken with
	written map[int64]int   // how often a settle has written it
}

// Whatever dies at which step: each committed event is settled, once, and those of one key in the
// order in which they were committed.
func TestTakersAndKills(t *testing.T) {
	t.Parallel()
	for _, takers := range []int{2, 4} {
		t.Run(fmt.Sprint(takers), func(t *testing.T) {
			t.Parallel()
			c := &crowd{room: newRoom(t), seqs: map[int64]int64{}, written: map[int64]int{}}
			c.producing.Store(true)
			var producers, relays sync.WaitGroup
			for i := range 4 {
				producers.Go(func() { c.produce(t.Context(), i, testsize.Of(400, 80)) })
			}
			for i := range takers {
				relays.Go(func() { c.relay(t.Context(), int32(i+1), rand.New(rand.NewPCG(uint64(i), uint64(takers)))) })
			}
			producers.Wait()
			c.producing.Store(false)
			relays.Wait()
			c.check()
		})
	}
}

// produce commits and rolls back transactions of several events. Those of key p<i> follow each
// other; those without a key overlap.
func (c *crowd) produce(ctx context.Context, number, transactions int) {
	random := rand.New(rand.NewPCG(uint64(number), 7))
	conn, err := pgx.Connect(ctx, c.DSN)
	if err != nil {
		c.Error(err)
		return
	}
	defer conn.Close(context.WithoutCancel(ctx))
	open := []pgx.Tx{}
	begin := func() pgx.Tx {
		tx, err := c.Pool.Begin(ctx)
		if err != nil {
			c.Error(err)
		}
		return tx
	}
	for i := range transactions {
		key := fmt.Sprintf("%d-%d", number, i)
		if random.IntN(8) == 0 && len(open) < 1 {
			tx := begin()
			_, err = tx.Exec(ctx, insertMany, "long-"+key+"-", 1+random.IntN(10))
			open = append(open, tx)
		} else {
			tx, beginErr := conn.Begin(ctx)
			if beginErr != nil {
				c.Error(beginErr)
				return
			}
			_, err = tx.Exec(ctx, insertKeyed, key, fmt.Sprint("p", number))
			if random.IntN(3) == 0 {
				inner, _ := tx.Begin(ctx) // a savepoint
				_, _ = inner.Exec(ctx, insertMany, "undone-"+key+"-", 3)
				_ = inner.Rollback(ctx)
				inner, _ = tx.Begin(ctx)
				_, _ = inner.Exec(ctx, insertMany, "nested-"+key+"-", 3)
				_ = inner.Commit(ctx)
			}
			if random.IntN(5) == 0 {
				_ = tx.Rollback(ctx)
			} else if err == nil {
				err = tx.Commit(ctx)
			}
		}
		if err != nil {
			c.Error(err)
			return
		}
		if len(open) > 0 && random.IntN(10) == 0 {
			_, err = open[0].Exec(ctx, insertMany, "last-"+key+"-", 2)
			if err == nil {
				err = open[0].Commit(ctx)
			}
			if err != nil {
				c.Error(err)
				return
			}
			open = open[1:]
		}
	}
	for _, tx := range open {
		if err := tx.Commit(ctx); err != nil {
			c.Error(err)
		}
	}
}

// relay takes and settles until all is settled. At each step it may die: it forgets all, and
// another relay begins under the next number.
func (c *crowd) relay(ctx context.Context, relayID int32, random *rand.Rand) {
	pool := relayPool(c, c.DSN)
	for ctx.Err() == nil {
		done, err := c.live(ctx, pool, relayID, random)
		if err != nil {
			c.Error(err)
			return
		}
		if done {
			return
		}
		if err := pool.QueryRow(ctx, `WITH gone AS (DELETE FROM outbox_relay WHERE id = $1)
			INSERT INTO outbox_relay (name, version) VALUES ('next', '') RETURNING id`, relayID).Scan(&relayID); err != nil {
			c.Error(err)
			return
		}
	}
}

func (c *crowd) live(ctx context.Context, pool *pgxpool.Pool, relayID int32, random *rand.Rand) (done bool, err error) {
	dies := func() bool { return random.IntN(30) == 0 }
	hands := map[int64]Range{}
	more := false
	for {
		producing := c.producing.Load()
		inHand := []int64{}
		for _, of := range hands {
			inHand = append(inHand, of.Fence)
		}
		rescued, found, err := RescueRange(ctx, pool, relayID, inHand, 1<<20)
		if err != nil {
			return false, err
		}
		if found {
			c.rescues.Add(1)
			c.note(rescued)
			hands[rescued.Seq] = rescued
		}
		terms := Terms{Events: 1 + random.IntN(8)}
		r, err := TakeRange(ctx, pool, relayID, terms, more)
		if err != nil {
			return false, err
		}
		if dies() { // after the take: its answer may just as well be lost
			return false, nil
		}
		if more = r.More; more {
			c.cuts.Add(1)
		}
		if len(r.Events) > 0 {
			c.note(r)
			hands[r.Seq] = r
		}
		if r.Found == Nothing && len(hands) == 0 && !found && !producing {
			return true, nil
		}
		for seq, of := range hands {
			if random.IntN(3) == 0 && r.Found != Nothing {
				continue // the sends take longer
			}
			half := settlement(relayID, of, of.Events[:random.IntN(len(of.Events)+1)])
			half.Ended = nil
			if err := c.settleSome(ctx, pool, half); err != nil {
				return false, err
			}
			if dies() { // half settled
				return false, nil
			}
			if err := c.settleSome(ctx, pool, settlement(relayID, of, of.Events)); err != nil {
				return false, err
			}
			delete(hands, seq)
		}
	}
}

func (c *crowd) note(r Range) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range r.Events {
		id := r.Events[i].ID
		if seq, taken := c.seqs[id]; taken && seq != r.Seq {
			c.Errorf("event %d is in the ranges %d and %d", id, seq, r.Seq)
		}
		c.seqs[id] = r.Seq
	}
}

func (c *crowd) settleSome(ctx context.Context, pool *pgxpool.Pool, s NewRows) error {
	done, err := SettleRanges(ctx, pool, s)
	if err != nil || len(done.Lost) > 0 {
		return err
	}
	existing := map[int]bool{}
	for _, i := range done.Existing {
		existing[i] = true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, d := range s.Deliveries {
		if !existing[i] {
			c.written[d.EventID]++
		}
	}
	return nil
}

func (c *crowd) check() {
	c.Helper()
	events := relaytest.Rows[int64](c.Database, `SELECT id FROM outbox ORDER BY id`)
	for _, id := range events {
		if c.written[id] != 1 || c.seqs[id] == 0 {
			c.Errorf("event %d was taken with range %d and written %d times", id, c.seqs[id], c.written[id])
		}
	}
	if len(c.written) != len(events) || c.rescues.Load() == 0 || c.cuts.Load() == 0 {
		c.Errorf("%d events of %d were written; %d rescues, %d cuts", len(c.written), len(events), c.rescues.Load(), c.cuts.Load())
	}
	if n := relaytest.Row[int](c.Database, `SELECT count(*)::int FROM outbox e FULL JOIN outbox_delivery d ON d.event_id = e.id
		WHERE e.id IS NULL OR d.status IS DISTINCT FROM 'delivered'`); n != 0 {
		c.Errorf("%d events and deliveries do not match", n)
	}
	if n := relaytest.Row[int](c.Database, `SELECT count(*)::int FROM outbox_range WHERE ended_at IS NULL`); n != 0 {
		c.Errorf("%d ranges are open", n)
	}
	last := map[string]int64{}
	for _, key := range relaytest.Rows[string](c.Database, `SELECT DISTINCT ordering_key FROM outbox WHERE ordering_key IS NOT NULL`) {
		for _, id := range relaytest.Rows[int64](c.Database, `SELECT id FROM outbox WHERE ordering_key = $1 ORDER BY id`, key) {
			if c.seqs[id] < last[key] {
				c.Errorf("event %d of key %s is in range %d, behind %d", id, key, c.seqs[id], last[key])
			}
			last[key] = c.seqs[id]
		}
	}
}
