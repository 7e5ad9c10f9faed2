package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outbox-relay/outbox-relay/internal/chaos/history"
	"github.com/outbox-relay/outbox-relay/outbox"
)

const producerTables = `
CREATE TABLE sales (key text PRIMARY KEY);
CREATE TABLE chaos_aged AS SELECT 0::bigint AS upto; -- events up to this one are not of this run
CREATE TABLE chaos_relay (relay_id int, name text); -- of those that are gone, too
CREATE FUNCTION chaos_relay() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = public AS $$
BEGIN
    INSERT INTO chaos_relay VALUES (NEW.id, NEW.name);
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_relay AFTER INSERT ON outbox_relay FOR EACH ROW EXECUTE FUNCTION chaos_relay();
CREATE TABLE chaos_reopened (what text);
CREATE FUNCTION chaos_reopened() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = public AS $$
BEGIN
    INSERT INTO chaos_reopened VALUES (format('%s %s > %s', OLD.event_id, OLD.status, coalesce(NEW.status, 'deleted')));
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_reopened AFTER UPDATE ON outbox_delivery
    FOR EACH ROW WHEN (OLD.status <> 'pending' AND OLD.status <> NEW.status
        OR OLD.status = 'delivered' AND (OLD.claim, OLD.attempts, OLD.delivered_at) IS DISTINCT FROM (NEW.claim, NEW.attempts, NEW.delivered_at))
    EXECUTE FUNCTION chaos_reopened();
-- What is parked has the destination '', and other rows take its place when a route comes.
CREATE TRIGGER chaos_deleted AFTER DELETE ON outbox_delivery
    FOR EACH ROW WHEN (OLD.status <> 'pending' OR OLD.destination <> '') EXECUTE FUNCTION chaos_reopened();`

const (
	insertSale = `INSERT INTO sales (key) VALUES ($1)`
	// insertEvent is how a service in any language enqueues.
	insertEvent = `INSERT INTO outbox (event_type, payload, idempotency_key, ordering_key, available_at)
VALUES ('sale.made', json_build_object('key', $1::text, 'note', '` + canary + `'), $1, nullif($2, ''), now() + $3 * interval '1 ms')`
)

const (
	producers = 4
	keysEach  = 10 // ordering keys of one producer, so that only successive transactions share one; the first has half of the events
)

// A payload is that of an event.
type payload struct {
	Key  string `json:"key"`
	Note string `json:"note"` // no log may hold it
}

const canary = "a note for the receiver alone"

// A sale is one business transaction, as the seed chooses it.
type sale struct {
	key, orderingKey string
	plain, rollback  bool
	held             time.Duration // the transaction stays open
	due              int           // milliseconds until its event is due; 0: at once
}

func newSale(random *rand.Rand, producer, n int) sale {
	s := sale{key: fmt.Sprintf("sale-%d-%d", producer, n), plain: random.IntN(4) == 0, rollback: random.IntN(20) == 0}
	switch random.IntN(10) {
	case 0, 1, 2, 3, 4:
		s.orderingKey = fmt.Sprintf("customer-%d-%d", producer, max(0, random.IntN(2*keysEach)-keysEach))
	case 5:
		s.due = 200 + random.IntN(2000)
	}
	if random.IntN(200) == 0 {
		s.held = time.Duration(100+random.IntN(1000)) * time.Millisecond
	}
	return s
}

// produce makes sales until ctx is done, most, or max if that is not 0.
func (s *stage) produce(ctx context.Context, producer int, perSecond float64, most int) {
	random := rand.New(rand.NewPCG(s.seed, uint64(producer)))
	tick := time.NewTicker(time.Duration(float64(time.Second) * producers / perSecond))
	defer tick.Stop()
	burst := 0 // sales that follow at once, so that relays find more than one of them can take
	for n := 1; most == 0 || n <= most; n++ {
		if burst--; burst < 0 {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
			if random.IntN(100) == 0 {
				burst = 100
			}
		}
		s.sell(context.WithoutCancel(ctx), producer, newSale(random, producer, n))
	}
}

// sell runs one transaction and records what its producer knows of it.
func (s *stage) sell(ctx context.Context, producer int, sale sale) {
	note := ""
	switch {
	case strings.HasPrefix(sale.key, unfit):
		note = history.Unfit
	case sale.due > 0:
		note = history.Later
	}
	done := s.history.Invoke(history.Record{Kind: history.Commit, Who: fmt.Sprintf("producer-%d", producer), Key: sale.key, Note: note})
	done(s.transact(ctx, sale), 0, "")
}

func (s *stage) transact(ctx context.Context, sale sale) history.Outcome {
	tx, err := s.outbox.Begin(ctx)
	if err != nil {
		return history.Fail
	}
	defer func() { _ = tx.Rollback(ctx) }() // after a commit it does nothing
	if err := enqueue(ctx, tx, sale); err != nil || sale.rollback {
		return history.Fail
	}
	if sale.held > 0 {
		<-time.After(sale.held)
	}
	if err := tx.Commit(ctx); err != nil {
		return history.Unknown
	}
	return history.OK
}

func enqueue(ctx context.Context, tx pgx.Tx, sale sale) error {
	if _, err := tx.Exec(ctx, insertSale, sale.key); err != nil {
		return err
	}
	if sale.plain || sale.due > 0 {
		_, err := tx.Exec(ctx, insertEvent, sale.key, sale.orderingKey, sale.due)
		return err
	}
	event, err := outbox.NewEvent("sale.made", sale.key, payload{sale.key, canary})
	if err != nil {
		return err
	}
	event.OrderingKey = sale.orderingKey
	_, err = outbox.Enqueue(ctx, tx, event)
	return err
}
